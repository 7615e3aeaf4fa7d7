"""A scan's folder: what is added to it, what is refused, and that an interrupted scan ends the same."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import pytest
import torch

import surgeon
from surgeon.analysis.engine import measure as workers
from surgeon.analysis.engine.measure import measure
from surgeon.analysis.scan import JOURNAL
from surgeon.findings.scan import Scan
from surgeon.language.operations import prune
from surgeon.language.program import Program
from surgeon.models.edit import edit, program_of
from surgeon.progress import TimeOver
from surgeon.quality.data import Windows
from surgeon.quality.head import logits_of, text_quality
from tests import warm
from tests.analysis.scanning import LAYERS, Stopped, plain_nll, run, scan_cells, stopping
from tests.selection import one_in
from tests.tiny_models import save_checkpoint, tiny_model
from tests.waiting import wait_until

WINDOWS, TOKENS = 5, 12


def test_what_an_interrupted_scan_was_asked_for_is_not_asked_for_again(
    windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "measure", stopping(3))
    with pytest.raises(Stopped):
        run(tmp_path, windows)
    monkeypatch.undo()
    assert len(run(tmp_path, windows, operations=["prune"], every=2).cells) == 3


@pytest.mark.parametrize("stops", one_in(3, [[0], [1], [17], [40, 10, 3], [20, 20, 20, 20]]))
def test_interrupted_and_resumed(
    stops: list[int], windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "at-once", windows, batch=2)
    for after in stops:
        monkeypatch.setattr(workers, "measure", stopping(after))
        with pytest.raises(Stopped):
            run(tmp_path / "stopped", windows, batch=2)
        monkeypatch.undo()
        with (tmp_path / "stopped" / JOURNAL).open("a") as journal:
            journal.write('{"program":"A0 F0","sta')  # a kill while a line is written
    result = run(tmp_path / "stopped", windows, batch=2)
    for name in ("cells.csv", "scan.json"):
        assert (tmp_path / "at-once" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()
    assert len(result.cells) == 50


@pytest.mark.parametrize(("after", "batch"), [(0, 2), (30, 2), (70, 2), (12, WINDOWS)])
def test_where_the_time_is_over_there_is_what_was_measured(
    after: int, batch: int, windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole", windows, batch=batch)
    calls = 0

    def late(*arguments: Any, **options: Any) -> Iterator[Any]:
        nonlocal calls
        calls += 1
        for count, measured in enumerate(measure(*arguments, **options)):
            if calls == 1 and count == after:
                raise TimeOver
            yield measured

    monkeypatch.setattr(workers, "measure", late)
    if after == 0:
        with pytest.raises(TimeOver, match="before the first cell"):
            run(tmp_path / "late", windows, batch=batch)
    else:
        found = run(tmp_path / "late", windows, batch=batch)
        assert 0 < len(found.cells) == 50 - found.record.get("cells_missing", 0)
        assert found.base_perplexity == whole.base_perplexity
        keys = ["operation", "first", "last"]
        both = found.cells.merge(whole.cells, on=keys, suffixes=("", "_whole"))
        done = both[both["tokens"] == WINDOWS * (TOKENS - 1)]
        assert len(both) == len(found.cells)
        assert done["perplexity"].tolist() == done["perplexity_whole"].tolist()
        base = plain_nll(tiny_model("llama", LAYERS), windows.ids, Program.dense(LAYERS))
        programs = {
            (one.operation, one.first, one.last): one.program for one in scan_cells(["prune"], LAYERS, 0)
        }
        for row in found.cells[found.cells["operation"] == "prune"].itertuples():
            seen = int(row.tokens) // (TOKENS - 1)
            program = programs[row.operation, row.first, row.last]
            # Told beside the model's own program on the same windows.
            if seen < WINDOWS and program.nodes:
                nll = plain_nll(tiny_model("llama", LAYERS), windows.ids[:seen], program)
                told = math.exp(fmean(base) + fmean(nll) - fmean(base[:seen]))
                assert row.perplexity == pytest.approx(told, rel=1e-5)
    monkeypatch.undo()
    run(tmp_path / "late", windows, batch=batch)
    for name in ("cells.csv", "scan.json"):
        assert (tmp_path / "late" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_what_is_counted_is_what_runs(
    windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a new scan, and of one that some cells have been measured for already."""
    bars: list[list[float]] = []

    @contextmanager
    def counted(_: str, total: float, __: str, done: float = 0) -> Iterator[Callable[[float], None]]:
        bars.append([total, done])
        yield bars[-1].append

    monkeypatch.setattr(workers, "progress", counted)
    run(tmp_path, windows, operations=["prune"], batch=WINDOWS)
    run(tmp_path, windows, operations=["prune", "merge", "parallel"], batch=WINDOWS)
    assert len(bars) == 2
    for total, done, *amounts in bars:
        assert done + sum(amounts) == pytest.approx(total)
    assert bars[0][1] == 0 < bars[1][1]


def test_a_finished_scan_runs_nothing_again(windows: Windows, tmp_path: Path) -> None:
    run(tmp_path, windows)
    before = (tmp_path / "cells.csv").read_bytes(), (tmp_path / JOURNAL).read_bytes()
    model = tiny_model("llama", LAYERS)
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: pytest.fail("a layer ran"))
        layer.mlp.register_forward_hook(lambda *_: pytest.fail("a layer ran"))
    run(tmp_path, windows, model)
    assert before == ((tmp_path / "cells.csv").read_bytes(), (tmp_path / JOURNAL).read_bytes())


def test_operations_can_be_added_to_a_folder(windows: Windows, tmp_path: Path) -> None:
    run(tmp_path / "both", windows, operations=["prune", "parallel"])
    run(tmp_path / "one-by-one", windows, operations=["parallel"])
    run(tmp_path / "one-by-one", windows, operations=["prune"])
    both, added = (pd.read_csv(tmp_path / name / "cells.csv") for name in ("both", "one-by-one"))
    pd.testing.assert_frame_equal(both, added, rtol=1e-6, atol=1e-6)


def test_more_permutations_are_added_to_a_folder(windows: Windows, tmp_path: Path) -> None:
    folder = tmp_path / "both"
    run(folder, windows, operations=["shuffle"])
    more = run(folder, windows, operations=["shuffle"], permutations=3)
    orders = pd.read_csv(folder / "permutations.csv")
    lines = [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]
    measured = [line["program"] for line in lines if "program" in line]
    different = {
        " ".join(
            f"A{k} F{k}" for k in [*range(first), *map(int, order.split()), *range(last + 1, LAYERS)]
        )
        for first, last, order in orders[["first", "last", "order"]].itertuples(index=False)
    }
    assert sorted(measured) == sorted(different), "each order once, those of the first run not again"
    at_once = run(tmp_path / "at-once", windows, operations=["shuffle"], permutations=3)
    pd.testing.assert_frame_equal(more.cells, at_once.cells, rtol=1e-6, atol=1e-6)
    again = run(folder, windows, operations=["prune"], permutations=1)
    assert again.record["permutations"] == 3, "what was finer stays finer"
    shuffled = again.cells[again.cells["operation"] == "shuffle"]
    pd.testing.assert_frame_equal(shuffled, at_once.cells, rtol=1e-6, atol=1e-6)


def test_cells_are_added_to_a_folder(windows: Windows, tmp_path: Path) -> None:
    run(tmp_path, windows, operations=["prune"], layers=range(0, 2))
    run(tmp_path, windows, operations=["prune", "lp"], layers=range(2, 4))
    grid = run(tmp_path, windows, operations=["lp"], every=2)
    found = list(grid.cells[["operation", "first", "last"]].itertuples(index=False, name=None))
    expected = [
        ("prune", 0, 0),
        ("prune", 0, 1),
        ("prune", 1, 1),
        ("prune", 2, 2),
        ("prune", 2, 3),
        ("prune", 3, 3),
    ]
    expected += [("lp", 0, 1), ("lp", 0, 3), ("lp", 2, 2), ("lp", 2, 3), ("lp", 3, 3)]
    assert found == expected
    assert [earlier["layers"] for earlier in grid.record["earlier"]] == ["0:2", "2:4"]
    assert (grid.record["layers"], grid.record["every"]) == ("0:4", 2)
    assert grid.record["operations"] == ["prune", "lp"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_hash": "other"}, "another model .*weights, now other"),
        ({"seed": 1}, "another seed: 0, now 1"),
        (
            {"windows": Windows(torch.zeros(WINDOWS, TOKENS + 1, dtype=torch.long), "", "digest")},
            f"another window size: {TOKENS}, now {TOKENS + 1}",
        ),
        (
            {"windows": Windows(torch.zeros(WINDOWS, TOKENS, dtype=torch.long), "", "else")},
            "another text .*digest, now else",
        ),
    ],
)
def test_a_folder_of_another_scan_is_refused(
    change: dict[str, Any], message: str, windows: Windows, tmp_path: Path
) -> None:
    run(tmp_path, windows, operations=["prune"])
    before = (tmp_path / "cells.csv").read_bytes()
    with pytest.raises(ValueError, match=message):
        run(tmp_path, **({"windows": windows} | change))
    assert (tmp_path / "cells.csv").read_bytes() == before


def test_a_journal_of_before_acceptance_was_measured_is_gone_on_with(
    windows: Windows, tmp_path: Path
) -> None:
    whole = run(tmp_path, windows, operations=["prune"]).cells
    journal = tmp_path / JOURNAL
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    older = [
        {name: value for name, value in line.items() if name != "greedy_acceptance"} for line in lines
    ]
    assert older != lines
    journal.write_text("".join(json.dumps(line) + "\n" for line in older))
    again = run(tmp_path, windows, operations=["prune"]).cells
    assert whole["greedy_acceptance"].between(0, 1).all()
    assert again["greedy_acceptance"].isna().all()
    pd.testing.assert_series_equal(again["divergence"], whole["divergence"])
    assert Scan.read(tmp_path).cells["greedy_acceptance"].isna().all()


def test_sampled_acceptance_is_measured_where_it_is_asked_for(windows: Windows, tmp_path: Path) -> None:
    without = run(tmp_path, windows, operations=["prune"]).cells
    assert "sampled_acceptance" not in without
    cells = run(tmp_path, windows, operations=["prune"], sampled=True).cells
    # But for what ran.
    pd.testing.assert_frame_equal(cells[without.columns].iloc[:, :-1], without.iloc[:, :-1])
    original, changed = tiny_model("llama", LAYERS), tiny_model("llama", LAYERS)
    edit(changed, prune(program_of(changed), range(1, 2)))
    (cell,) = cells[(cells["first"] == 1) & (cells["last"] == 1)].to_dict("records")
    wanted = text_quality(logits_of(changed), windows.ids, logits_of(original), bar=False)
    assert cell["sampled_acceptance"] == pytest.approx(wanted.sampled_acceptance, rel=1e-5)
    again = run(tmp_path, windows, operations=["prune"]).cells
    pd.testing.assert_series_equal(again["sampled_acceptance"], cells["sampled_acceptance"])


def test_a_damaged_journal_is_said_to_be(windows: Windows, tmp_path: Path) -> None:
    run(tmp_path, windows, operations=["prune"])
    journal = tmp_path / JOURNAL
    lines = journal.read_text().splitlines()
    beyond = '{"program": "A0", "windows": [99], "nll": [0], "divergence": [0]}'
    for damage in ("not json", "[]", '{"other": 1}', beyond):
        journal.write_text("\n".join([*lines[:3], damage, *lines[3:]]) + "\n")
        with pytest.raises(ValueError, match="damaged in line 4; delete the file to begin again"):
            run(tmp_path, windows)


def table_of(folder: Path) -> pd.DataFrame:
    """A scan's cells, but for how many sublayers ran, which depends on what was measured before."""
    places = ["operation", "first", "last"]
    return (
        pd.read_csv(folder / "cells.csv")
        .drop(columns="sublayers_run")
        .sort_values(places, ignore_index=True)
    )


@pytest.mark.parametrize("name", [JOURNAL, "cells.csv", "permutations.csv", "scan.json"])
@pytest.mark.parametrize("left", [None, 0.0, 0.5])
def test_what_is_lost_of_a_folder_is_measured_again(
    name: str, left: float | None, windows: Windows, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Also what only an earlier scan was asked for; a journal's loss is said, the other files are written anew."""
    run(tmp_path, windows, operations=["prune"], layers=range(2))
    run(tmp_path, windows, operations=["shuffle"], permutations=2)
    cells, permutations = table_of(tmp_path), (tmp_path / "permutations.csv").read_bytes()
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    if left is not None:
        (tmp_path / name).write_bytes(whole[: int(left * len(whole))])
    recwarn.clear()
    run(tmp_path, windows, operations=["shuffle"], permutations=2)
    pd.testing.assert_frame_equal(table_of(tmp_path), cells)
    assert (tmp_path / "permutations.csv").read_bytes() == permutations
    said = [str(each.message) for each in recwarn]
    assert bool(said) is (name == JOURNAL)
    if said:
        assert "journal.jsonl is " in said[0]
        assert ("gone or empty" if not left else "cut short") in said[0]
        assert left == 0.5 or "has lost a scan of prune on layers 0:2" in said[1]


def test_a_record_of_something_else_is_not_recovered(windows: Windows, tmp_path: Path) -> None:
    run(tmp_path, windows, operations=["prune"])
    (tmp_path / JOURNAL).unlink()
    with pytest.warns(UserWarning, match="gone or empty"):
        again = run(tmp_path, windows, operations=["merge"], model_hash="other")
    assert set(again.cells["operation"]) == {"merge"}


def test_two_scans_do_not_write_to_one_folder(
    windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(*_: Any, **__: Any) -> Any:
        monkeypatch.undo()
        with pytest.raises(OSError, match="another scan is writing"):
            run(tmp_path, windows)
        raise Stopped

    monkeypatch.setattr(workers, "measure", second)
    with pytest.raises(Stopped):
        run(tmp_path, windows)


def test_an_output_folder_that_is_a_file(windows: Windows, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        run(tmp_path / "file", windows)


KILLED = """
import sys, time
from surgeon.analysis.scan import ScanJournal
slow = ScanJournal.keep
def keep(self, *lines):
    slow(self, *lines)
    time.sleep(0.02)
ScanJournal.keep = keep
from surgeon.commands.app import main
raise SystemExit(main(sys.argv[1:]))
"""


def test_killed_and_started_again(
    tmp_path: Path, tiny_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_checkpoint(tmp_path / "model", num_layers=3)
    arguments = [
        "scan",
        str(model),
        "--data",
        str(tiny_text),
        "--window",
        "16",
        "--tokens",
        "128",
        "--batch",
        "2",
        "--screen",
    ]
    command = [sys.executable, "-c", KILLED, *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(surgeon.__file__).parents[1])}
    folder = tmp_path / "killed"
    child = warm.Popen([*command, "-o", str(folder)], env=environment, stderr=subprocess.DEVNULL)
    journal = folder / JOURNAL
    wait_until(
        lambda: (
            child.poll() is not None or (journal.exists() and journal.read_bytes().count(b"\n") >= 20)
        )
    )
    assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (folder / "cells.csv").exists()
    from surgeon.commands.app import main

    assert main([*arguments, "-o", str(folder)]) == 0
    assert "sublayers run" in capsys.readouterr().out
    assert main([*arguments, "-o", str(tmp_path / "whole")]) == 0
    assert (folder / "cells.csv").read_bytes() == (tmp_path / "whole" / "cells.csv").read_bytes()
