"""`surgeon bench` from the command line: tables on stdout, files, a trace, clear refusals before anything starts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import psutil
import pytest
from matplotlib.image import imread

from surgeon.commands.app import main
from tests import warm
from tests.selection import one_in
from tests.waiting import PATIENCE, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = ["--prompt", "4", "--new", "3", "--rounds", "2"]


def test_tables_files_and_trace(
    tiny_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, trace = tmp_path / "results", tmp_path / "trace.json"
    compared = ["--compare", "lp", "--compare", "upper-bound", "--layers", "1:3", "--batch", "1,2"]
    options = [
        "--link-delay",
        "1ms",
        "--link-bandwidth",
        "1GB",
        "-o",
        str(folder),
        "--trace",
        str(trace),
    ]
    assert main(["bench", str(tiny_checkpoint), *compared, *options, *SMALL]) == 0
    out = capfd.readouterr().out
    assert out.startswith("2 ranks (cpu, shm, link of 1ms, 1 GB/s), prompt 4, 3 new, 2 rounds\n")
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    table = pd.read_csv(folder / "bench.csv")
    assert list(zip(table["program"], table["batch"], strict=True)) == [
        (name, batch) for batch in (1, 2) for name in ("tiny-llama", "lp", "upper-bound")
    ]
    assert list(table["sync_points"]) == list(table["decode_all_reduces"]) == 2 * [8, 6, 0]
    assert (table["per_token_speedup"].iloc[[0, 3]] == 1).all()
    waited = table["decode_waiting_ms"]
    assert (waited.iloc[[0, 3]] > 10 * 0.9).all()  # 8 reductions, the embedding's and the head's
    assert (waited.iloc[[2, 5]] == 0).all()
    record = json.loads((folder / "bench.json").read_text())
    assert record["model"] == str(tiny_checkpoint)
    assert [len(one["rounds"]) for one in record["results"]] == 6 * [2]
    assert record["results"][1]["text"] == "A0 F0 [A1 A2] [F1 F2] A3 F3"
    assert imread(folder / "bench.png").std() > 0.1
    for rank in (0, 1):
        events = json.loads(trace.with_name(f"trace.rank{rank}.json").read_text())["traceEvents"]
        assert {"tiny-llama", "lp", "upper-bound"} <= {event["name"] for event in events}


@pytest.mark.parametrize("data", one_in(2, [None, "demo"]))
def test_what_compression_changes_is_told(
    data: str | None, tiny_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--compress", "int4", "--compare", "lp", "--compare", "upper-bound", "--layers", "1:3"]
    options += ["--output", str(tmp_path), "--new", "28", *([] if data is None else ["--data", data])]
    assert main(["bench", str(tiny_checkpoint), *SMALL, *options]) == 0
    out = capfd.readouterr().out
    assert "(cpu, shm, int4)" in out
    told = out.partition("\n\nWhat int4 changes in predictions, nats per token\n")[2]
    columns, *rows = told.partition(f"\n{tmp_path}")[0].splitlines()  # files stand behind it
    assert columns.split() == ["program", "divergence", "95%", "interval"]
    record = json.loads((tmp_path / "bench.json").read_text())
    assert (record["compression"], record["compared"]) == ("int4", data or "random tokens")
    assert record["predicted"] >= 900
    table = pd.read_csv(tmp_path / "bench.csv").dropna(subset=["divergence"]).drop_duplicates("program")
    assert [row.split()[0] for row in rows] == list(table["program"]) == ["tiny-llama", "lp"]
    for row, (_, one) in zip(rows, table.iterrows(), strict=True):
        assert one["divergence"] == pytest.approx(float(row.split()[1]), rel=0.01)
        assert one["divergence"] == pytest.approx(record["divergence"][one["program"]])
        assert 1e-6 < one["divergence_low"] < one["divergence"] < one["divergence_high"] < 1


def test_one_rank_without_communication(
    tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(tiny_checkpoint), "--tp", "1", "--program", "A0 F0", *SMALL]) == 0
    out = capfd.readouterr().out
    assert out.startswith("1 rank (cpu, shm), prompt 4")
    assert "0+0" in out
    assert "Times as fast" not in out


def test_ranks_that_are_not_connected(tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tiny_checkpoint), "--collectives", "none", *SMALL]) == 0
    assert "2 ranks (cpu, none)" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--link-delay", "1"], "'1' is no delay; write e.g. 1ms, 200us or 0.5s"),
        (["--link-bandwidth", "fast"], "'fast' is no amount of memory"),
        (["--layers", "3"], "layers '3' are no range"),
        (
            ["--data", "demo"],
            "demo is for measuring what compressed reductions change; have them compressed, too",
        ),
        (["--compress", "int8", "--data", "no-such-file.txt"], "no-such-file.txt"),
        (["--compress", "int7"], "there is no compression 'int7'; did you mean 'int"),
        (["--collectives", "none", "--link-delay", "1ms"], "collectives none send nothing"),
        (
            ["--compare", "ladders"],
            "there is no model folder ladders, nor a variant of a model; did you mean 'ladder'?",
        ),
        (["--compare", "lp"], "the model has 4 layers, and variants leave the first and last 2 alone"),
        (["--prompt", "2000"], "shorten the prompt or ask for fewer tokens"),
        (["--trace", "."], "the trace . must be a file in a folder that exists"),
        (["--tp", "100"], "100 ranks cannot share this model"),
    ],
)
def test_what_is_refused(
    options: list[str], message: str, tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(tiny_checkpoint), *options]) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def measuring_ranks(command: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks of a bench, by rank, once they have computed for longer than starting and loading takes."""

    def compute() -> bool:
        ranks = warm.ranks_of(command.pid)
        return len(ranks) == 2 and ranks[1].cpu_times().user > 0.4

    wait_until(compute)
    return warm.ranks_of(command.pid)


@pytest.mark.parametrize(
    ("target", "name", "code", "message"),
    [
        ("rank", "SIGKILL", 1, r"error: rank 1 \(process \d+\) was ended by SIGKILL.*"),
        (
            "command",
            "SIGINT",
            130,
            "interrupted; nothing was written; the same command would begin anew",
        ),
    ],
)
def test_ending_in_the_middle(
    target: str, name: str, code: int, message: str, tiny_checkpoint: Path
) -> None:
    arguments = ["bench", str(tiny_checkpoint), *SMALL, "--rounds", "100000"]
    script = f"import sys; from surgeon.commands.app import main; sys.exit(main({arguments}))"
    command = warm.Popen(
        [sys.executable, "-c", script], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
    )
    try:
        ranks = measuring_ranks(command)
        (ranks[1] if target == "rank" else command).send_signal(signal.Signals[name])
        _, err = command.communicate(timeout=PATIENCE)
    finally:
        command.kill()
    assert command.returncode == code
    assert re.fullmatch(message, err.splitlines()[-1])
    assert "Traceback" not in err
    assert len(ranks) == 2
    assert psutil.wait_procs(ranks, timeout=PATIENCE)[1] == []
