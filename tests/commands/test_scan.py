"""`surgeon scan` as a user meets it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from surgeon.analysis import subject
from surgeon.commands.app import main
from surgeon.language.operations.base import HEATMAPS
from tests import warm
from tests.commands.conftest import Run
from tests.stored import configure


def errors_in(err: str) -> int:
    """Lines that are no progress bar of another library's."""
    return sum("error" in line or "Traceback" in line for line in err.splitlines())


@pytest.fixture
def scan(on_tiny_text: Run) -> Run:
    """Runs the command, with more arguments."""
    return partial(on_tiny_text, "scan", "--window", "32", "--tokens", "128")


def test_all_heatmaps(scan: Run, tmp_path: Path) -> None:
    code, out, err = scan("--seed", "4")
    assert code == 0, err
    folder = tmp_path / "out"
    names = {path.name for path in folder.iterdir()}
    pictures = {
        f"heatmap-{name}.png" for name in ("shuffle", "prune", "merge", "parallel", "2-parallel")
    }
    files = {
        "heatmaps.png",
        "curves-2-parallel.png",
        "cells.csv",
        "permutations.csv",
        "scan.json",
        "journal.jsonl",
    }
    assert names == pictures | files
    table = pd.read_csv(folder / "cells.csv")
    assert len(table) == 50
    assert (table["tokens"] == 4 * 31).all()
    record = json.loads((folder / "scan.json").read_text())
    assert (record["seed"], record["window"], record["tokens"], record["tokens_predicted"]) == (
        4,
        32,
        128,
        124,
    )
    assert len(record["model_hash"]) == len(record["data_hash"]) == 64
    assert f"{record['sublayers_run']['total']:,}; a loop over cells would have run" in out
    assert f"base perplexity {record['base_perplexity']:.4g}" in out
    assert "scan: done" in err


@pytest.mark.thorough
def test_every_operation(scan: Run, tmp_path: Path) -> None:
    code, out, err = scan("--operation", "all", "--permutations", "2", "--every", "2")
    assert code == 0, err
    table = pd.read_csv(tmp_path / "out" / "cells.csv")
    maps = {name: heatmap for name, heatmap in HEATMAPS.items() if name != "experts"}  # it is no mixture
    assert table["operation"].unique().tolist() == list(maps)
    # 0.9 and 0.75 of two KV heads are both of them, which changes nothing.
    assert len(table) == sum(2 * len(heatmap.values) or 3 for heatmap in maps.values()) - 2 * 2
    assert len(pd.read_csv(tmp_path / "out" / "permutations.csv")) == 3 * 2
    names = [f"curves-{name}.png" for name in ("lp", "2-parallel", "ladder")]
    assert out.splitlines()[-3:] == [str(tmp_path / "out" / name) for name in names]


def test_a_map_of_layers_and_keeps_goes_on_where_it_was(scan: Run, tmp_path: Path) -> None:
    assert scan("--operation", "lowrank", "--layers", "1:3")[0] == 0
    code, out, err = scan("--operation", "lowrank")
    assert code == 0, err
    table = pd.read_csv(tmp_path / "out" / "cells.csv")
    assert list(zip(table["first"], table["last"], table["keep"], strict=True)) == [
        (layer, layer, keep) for layer in range(4) for keep in (0.9, 0.8, 0.6, 0.4, 0.2)
    ]
    assert out.splitlines()[-1] == str(tmp_path / "out" / "heatmap-lowrank.png")
    journal = [
        json.loads(line) for line in (tmp_path / "out" / "journal.jsonl").read_text().splitlines()
    ]
    measured = [line["program"] for line in journal if "program" in line]
    assert len(measured) == len(set(measured)) == 1 + 4 * 5
    assert table["divergence"].groupby(table["keep"]).sum().is_monotonic_decreasing


def test_a_part_of_the_stretches(scan: Run, tmp_path: Path) -> None:
    code, _, err = scan("--operation", "lp", "--layers", "1:4", "--max-length", "2")
    assert code == 0, err
    table = pd.read_csv(tmp_path / "out" / "cells.csv")
    assert list(zip(table["first"], table["last"], strict=True)) == [
        (1, 1),
        (1, 2),
        (2, 2),
        (2, 3),
        (3, 3),
    ]
    record = json.loads((tmp_path / "out" / "scan.json").read_text())
    assert (record["layers"], record["max_length"], record["every"]) == ("1:4", 2, 1)


def test_screened(scan: Run, tmp_path: Path) -> None:
    code, out, err = scan("--operation", "prune", "--screen", "--window", "8")
    assert code == 0, err
    tokens = pd.read_csv(tmp_path / "out" / "cells.csv")["tokens"]
    assert f"screened: a cell rests on {tokens.mean() / (16 * 7):.0%} of the tokens on average" in out
    assert "scan, round 3 of 3: done" in err
    assert json.loads((tmp_path / "out" / "scan.json").read_text())["screen"]["hopeless_beyond"] == 10


def test_too_few_windows_to_screen(scan: Run, tmp_path: Path) -> None:
    code, _, err = scan("--operation", "prune", "--screen")
    assert code == 0, err
    assert "warning: the text has 4 windows, too few to screen" in err
    assert (pd.read_csv(tmp_path / "out" / "cells.csv")["tokens"] == 4 * 31).all()


def test_workers_with_nothing_but_the_unedited_model_to_run(scan: Run, tmp_path: Path) -> None:
    code, _, err = scan(
        "--operation", "shuffle", "--layers", "0:1", "--workers", "2", "--screen", "--window", "8"
    )
    assert code == 0, err
    table = pd.read_csv(tmp_path / "out" / "cells.csv")
    assert (table["tokens"].tolist(), table["divergence"].tolist()) == ([16 * 7], [0.0])


def test_help_says_what_the_options_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scan", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text.replace("- ", "-") for name in HEATMAPS)  # lines may end within a name
    assert (
        "begin at multiples of N, counted from the start of --layers, and whose length is a multiple of N"
        in text
    )
    assert "beyond ten times the base perplexity" in text
    assert "4:30 is layers 4 to 29" in text


def test_some_heatmaps_and_a_limit_of_memory(scan: Run, tmp_path: Path) -> None:
    code, _, err = scan(
        "--operation", "prune", "--operation", "parallel", "--memory", "100GB", "--batch", "1"
    )
    assert code == 0, err
    assert pd.read_csv(tmp_path / "out" / "cells.csv")["operation"].unique().tolist() == [
        "prune",
        "parallel",
    ]


def test_workers_and_weights_read_layer_by_layer_give_the_same_table(
    scan: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ways to run one scan: in this process, in two others, and with no room for the model's weights."""
    monkeypatch.setattr("multiprocessing.util.spawnv_passfds", warm.spawn)
    tables = []
    for name, more in (("here", ()), ("workers", ("--workers", "2")), ("streamed", ())):
        if name == "streamed":
            monkeypatch.setattr(subject, "available_bytes", lambda *_: 0)
        code, _, err = scan(
            "--operation", "prune", "--operation", "merge", "-o", str(tmp_path / name), *more
        )
        assert code == 0, err
        assert ("warning: the model's weights" in err) == (name == "streamed")
        tables.append(pd.read_csv(tmp_path / name / "cells.csv"))
    for table in tables[1:]:
        pd.testing.assert_frame_equal(table, tables[0], rtol=1e-5)


def test_a_warning_about_a_separator(scan: Run, tiny_text: Path) -> None:
    tiny_text.write_text(tiny_text.read_text().replace("\n", "<|endoftext|>"))
    code, _, err = scan("--operation", "prune")
    assert code == 0
    assert "warning: " in err
    assert "the separator '<|endoftext|>'" in err
    code, _, err = scan("--operation", "prune", "--separator", "<|endoftext|>")
    assert code == 1
    assert "holds a scan of another text" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--operation", "prun"), "did you mean 'prune'?"),
        (("--memory", "lots"), "write e.g. 512MB or 2GB"),
        (("--memory", "1MB"), "set memory to"),
        (("--window", "500"), "use a window of 128"),
        (("--window", "1"), "at least 2 tokens"),
        (("--tokens", "5"), "at least one window of 32"),
        (("--separator", ""), "separator is empty"),
        (("--layers", "2:9"), "layers 2:9 are out of range: the model's layers are 0:4"),
        (("--layers", "3:3"), "'3:3' are no range"),
        (("--layers", "3"), "'3' are no range"),
        (("--every", "0"), "every must be at least 1, not 0"),
        (("--every", "5"), "every 5 is more than the 4 layers of 0:4"),
        (("--max-length", "0"), "--max-length must be at least 1, not 0"),
        (("--max-length", "1", "--every", "2"), "--max-length 1 is less than every 2"),
        (("--permutations", "0"), "permutations must be at least 1, not 0"),
    ],
)
def test_bad_options(scan: Run, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = scan(*arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert errors_in(err) == 1
    assert not (tmp_path / "out" / "cells.csv").exists()


def test_bad_data(scan: Run, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("The quick brown fox")
    empty = tmp_path / "empty.txt"
    empty.touch()
    wanted = {
        str(short): "tokens, fewer than one window of 32",
        str(empty): "is empty",
        "nothing.txt": "no file nothing.txt",
    }
    for data, message in wanted.items():
        code, _, err = scan(data=data)
        assert code == 1
        assert message in err
        assert errors_in(err) == 1


def test_bad_models(scan: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    weights = tiny_checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, _, err = scan()
    assert code == 1
    assert "truncated" in err
    code, _, err = scan(model=str(tmp_path))
    assert code == 1
    assert "has no config.json" in err


def test_a_model_without_a_tokenizer(scan: Run, tiny_checkpoint: Path) -> None:
    for path in tiny_checkpoint.glob("tokenizer*"):
        path.unlink()
    code, _, err = scan()
    assert code == 1
    assert "tokenizer" in err
    assert errors_in(err) == 1


def test_a_folder_of_another_configuration_is_refused(
    scan: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    assert scan("--operation", "prune")[0] == 0
    before = (tmp_path / "out" / "cells.csv").read_bytes()
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    configure(tiny_checkpoint, rope_parameters=config["rope_parameters"] | {"rope_theta": 7.0})
    code, _, err = scan("--operation", "prune")
    assert (code, errors_in(err)) == (1, 1)
    assert "holds a scan of another model (hash of its configuration and weights): " in err
    configure(tiny_checkpoint, rope_parameters=config["rope_parameters"], transformers_version="0")
    assert scan("--operation", "prune")[0] == 0
    assert (tmp_path / "out" / "cells.csv").read_bytes() == before
