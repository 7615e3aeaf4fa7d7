"""Benchmarks that are run one after the other, kept, gone on with, and compared."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from scripts.bench import figures
from scripts.bench.figures import FIGURES, PROJECT, Figure, main
from scripts.bench.goals import MISSED


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Benchmarks that print a table of what a file says: one ends well, one misses its goal, one fails behind it.

    Another one fails at once, without a goal but with the status of one, and one needs vLLM.
    """
    speed = tmp_path / "speed"
    speed.write_text("100")
    body = "print('| way | tokens/s |'); print('|---|---|'); print('| plain |', open({!r}).read(), '|')"
    prints = body.format(str(speed))
    scripts = {
        "quick": prints,
        "short": f"{prints}; from scripts.bench.goals import missed; raise missed('at least 1000 tokens/s')",
        "late": f"{prints}; 1 / 0",
        "broken": "raise SystemExit(3)",
    }
    made = [Figure(name, shlex.join(["-c", script]), 1) for name, script in scripts.items()]
    made.append(Figure("beside", "-c pass {vllm}", 1))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.setattr(figures, "FIGURES", made)
    return speed


def test_what_is_worse_is_named(
    made_up: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, now = str(tmp_path / "before"), str(tmp_path / "now")
    assert main(["-o", before, "--only", "quick", "--against", "nowhere"]) == 0
    assert "quick: nothing to compare it with in nowhere" in capfd.readouterr().out
    made_up.write_text("80")
    assert main(["-o", now, "--only", "quick", "--against", before]) == 1
    assert "plain, tokens/s: 100, now 80 (1.25 times worse)" in capfd.readouterr().out
    made_up.write_text("500")
    # It is there, and does not run again.
    assert main(["-o", now, "--only", "quick", "--against", before]) == 1
    assert main(["-o", now, "--only", "quick", "--against", before, "--tolerance", "0.3"]) == 0
    head = json.loads((tmp_path / "now" / "quick.txt").read_text().splitlines()[0])
    assert head["command"].startswith("python -c ")
    assert head["machine"]["cores"] >= 1
    assert head["machine"]["processor"]


def test_elsewhere_ratios_only(made_up: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    main(["-o", str(before), "--only", "quick", "--against", "nowhere"])
    page = (before / "quick.txt").read_text()
    head, rest = page.split("\n", 1)
    record = json.loads(head)
    record["machine"]["processor"] = "another"
    (before / "quick.txt").write_text(f"{json.dumps(record)}\n{rest}")
    made_up.write_text("10")
    assert main(["-o", str(now), "--only", "quick", "--against", str(before)]) == 0
    assert "quick (ratios only: another machine): nothing is worse" in capfd.readouterr().out
    record = json.loads(head)
    record["machine"]["instructions"] = ["another"]  # of a processor that has the same name
    (before / "quick.txt").write_text(f"{json.dumps(record)}\n{rest}")
    assert main(["-o", str(now), "--only", "quick", "--against", str(before)]) == 0
    assert "quick (ratios only: another machine): nothing is worse" in capfd.readouterr().out


def test_what_fails_or_is_left_out_is_said(
    made_up: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert made_up.exists()
    assert main(["-o", str(tmp_path / "now"), "--only", "broken,beside", "--against", "nowhere"]) == 1
    said = capfd.readouterr()
    assert "broken: failed" in said.out
    assert "beside: left out, it needs --vllm-python" in said.err
    assert not list((tmp_path / "now").iterdir())


def test_a_missed_goal_is_named_apart_and_its_table_kept(
    made_up: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    assert main(["-o", str(before), "--only", "quick,short", "--against", "nowhere"]) == MISSED == 3
    said = capfd.readouterr()
    assert "short: goal missed: at least 1000 tokens/s\n" in said.out
    assert "quick: goal" not in said.out
    assert "failed" not in said.out + said.err
    assert "| plain | 100 |\ngoal missed: at least 1000 tokens/s\n" in (before / "short.txt").read_text()
    made_up.write_text("80")
    # It does not run again.
    assert main(["-o", str(before), "--only", "short", "--against", "nowhere"]) == 3
    assert main(["-o", str(now), "--only", "short", "--against", str(before)]) == 1
    said = capfd.readouterr()
    assert "plain, tokens/s: 100, now 80 (1.25 times worse)" in said.out
    assert said.out.endswith("short: goal missed: at least 1000 tokens/s\n")


def test_what_a_benchmark_printed_before_it_failed(
    made_up: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert made_up.exists()
    arguments = ["-o", str(tmp_path), "--only", "short,late", "--against", "nowhere"]
    assert main(arguments) == 1
    assert "late: failed\n" in capfd.readouterr().out
    head, table = (tmp_path / "late.failed.txt").read_text().split("\n", 1)
    assert json.loads(head)["status"] == 1
    assert "| plain | 100 |" in table
    assert not (tmp_path / "late.txt").exists()
    made_up.write_text("80")
    assert main(arguments) == 1  # it runs again
    assert "| plain | 80 |" in (tmp_path / "late.failed.txt").read_text()
    assert "| plain | 100 |" in (tmp_path / "short.txt").read_text()
    capfd.readouterr()


def test_what_is_listed_is_there_and_in_the_readme(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capfd.readouterr().out
    words = " ".join(
        page.read_text(encoding="utf-8")
        for page in (PROJECT / "README.md", *(PROJECT / "docs").glob("*.md"))
    )
    for figure in FIGURES:
        script = shlex.split(figure.script)[0]
        assert (PROJECT / script).is_file()
        assert script in words
        assert figure.shown() in listed
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
