"""The comparison's texts, goals and rows; its tables and figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from scripts.real import page
from scripts.real.compare import COLUMNS, Comparison, Goal, Rows, Texts, main
from surgeon.searches.quantities import parse_limits

TEXT = "".join(f"line {number}\n" for number in range(400))


def rows(**of: Any) -> list[dict[str, Any]]:
    return [
        {
            "on": on,
            "metric": metric,
            "value": value,
            "low": value,
            "high": value,
            "count": 510,
            "program": "A0 F0",
            **of,
        }
        for on in ("a", "b")
        for metric, value in (("perplexity", 20.0), ("divergence", 0.5 if on == "a" else 1.0))
    ]


def test_a_text_is_searched_judged_and_healed_on_in_parts_that_share_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT.replace("line 7\n", "<|endoftext|>line 7\n"))
    texts = Texts.of({"a": str(tmp_path / "a.txt"), "code": "demo"}, tmp_path)
    parts = [
        Path(one).read_text() for one in (texts.searched, texts.judged["a"], next(iter(texts.healed)))
    ]
    assert "".join(parts) == TEXT.replace("line 7\n", "\nline 7\n")
    assert [*texts.judged] == ["a", "code"]
    assert (texts.judged["code"], [*texts.healed][1]) == ("demo", "demo:train")


def test_goals_are_budgets_of_a_search() -> None:
    assert Goal("size", 1.25).budget("repeats") == ["params=0.8000x", "depth>=1x"]
    assert Goal("1 ms link", 1.25).link_delay == "1ms"
    assert Goal("NVLink", 1.1).link_delay is None
    for place in ("size", "NVLink"):
        for text in Goal(place, 1.5).budget("repeats"):
            parse_limits(text)


def test_what_is_there_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Rows(tmp_path / "compare.csv")
    kept.add([{**one, "goal": "dense", "method": "dense", "stage": "edited"} for one in rows()])
    kept.add([{**one, "goal": "1.25 size", "method": "width", "stage": "edited"} for one in rows()])
    kept.add([{"goal": "1.25 size", "method": "drops", "stage": "edited", "on": "out of reach"}])
    again = Rows(tmp_path / "compare.csv")
    assert again.has("1.25 size", "width", "edited", "a")
    assert not again.has("1.25 size", "width", "healed", "a")
    assert [one["value"] for one in again.of_program("A0 F0", "edited", "b")] == [20.0, 1.0]
    assert list(again.table.columns) == COLUMNS
    monkeypatch.setattr(Comparison, "measure", lambda *_: None)
    monkeypatch.setattr("surgeon.search", pytest.fail)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(TEXT)
    texts = [f"--text={name}={tmp_path / name}.txt" for name in ("a", "b")]
    options = [
        "compare",
        "demo",
        "-o",
        str(tmp_path),
        *texts,
        "--goals",
        "1.25 size",
        "--methods",
        "width,drops",
    ]
    monkeypatch.setattr("sys.argv", options)
    main()


def test_tables_and_the_figure(tmp_path: Path) -> None:
    found = [
        {**one, "goal": "dense", "method": "dense", "stage": "edited", "reached": 1.0} for one in rows()
    ]
    for stage in ("edited", "healed"):
        found += [
            {**one, "goal": "1.25 1 ms link", "method": "LP", "stage": stage, "reached": 1.3}
            for one in rows()
        ]
    found.append({"goal": "1.5 1 ms link", "method": "LP", "stage": "edited", "on": "out of reach"})
    found += [
        {
            "goal": "1.25 1 ms link",
            "method": "LP",
            "stage": "edited",
            "on": "arc",
            "metric": "acc",
            "value": 0.5,
            "high": 0.6,
        }
    ]
    pd.DataFrame(found, columns=COLUMNS).to_csv(tmp_path / "rows.csv", index=False)
    table = page.read(tmp_path / "rows.csv")
    overview = page.overview(table, "1 ms link")
    assert overview.rows == [["LP", "0.75 → 0.75", "out of reach"]]
    assert overview.head == ["1 ms link", "1.25 times as fast", "1.5 times as fast"]
    tasks = page.tasks(table)
    assert tasks is not None
    assert tasks.rows == [["1.25 1 ms link", "LP", "edited", "50.0 ± 10.0"]]
    page.draw(table, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000
