"""`surgeon scan` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from surgeon.cli.app import main

Result = tuple[int, str, str]


def errors_in(err: str) -> int:
    """Lines that are no progress bar of another library's."""
    return sum("error" in line or "Traceback" in line for line in err.splitlines())


@pytest.fixture
def scan(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Runs the command on a tiny model and text, with more arguments; returns exit code, output and errors."""

    def run(*arguments: str, model: str | None = None, data: str | None = None) -> Result:
        command = ["scan", model or str(tiny_checkpoint), "--data", data or str(tiny_text), "-o", str(tmp_path / "out")]
        code = main([*command, "--window", "32", "--tokens", "128", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_all_heatmaps(scan, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, out, err = scan("--seed", "4")
    assert code == 0, err
    folder = tmp_path / "out"
    names = {path.name for path in folder.iterdir()}
    pictures = {f"heatmap-{name}.png" for name in ("shuffle", "prune", "merge", "parallel", "2-parallel")}
    assert names == pictures | {"heatmaps.png", "cells.csv", "scan.json", "journal.jsonl"}
    table = pd.read_csv(folder / "cells.csv")
    assert len(table) == 50
    assert (table["tokens"] == 4 * 31).all()
    record = json.loads((folder / "scan.json").read_text())
    assert (record["seed"], record["window"], record["tokens"], record["tokens_predicted"]) == (4, 32, 128, 124)
    assert len(record["weights_hash"]) == len(record["data_hash"]) == 64
    assert f"{record['sublayers_run']['total']:,}; a loop over cells would have run" in out
    assert f"base perplexity {record['base_perplexity']:.4g}" in out
    assert "scan: done" in err


def test_some_heatmaps_and_a_limit_of_memory(scan, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, _, err = scan("--operation", "prune", "--operation", "parallel", "--memory", "100GB", "--batch", "1")
    assert code == 0, err
    assert pd.read_csv(tmp_path / "out" / "cells.csv")["operation"].unique().tolist() == ["prune", "parallel"]


def test_a_warning_about_a_separator(scan, tiny_text: Path) -> None:  # type: ignore[no-untyped-def]
    tiny_text.write_text(tiny_text.read_text().replace("\n", "<|endoftext|>"))
    code, _, err = scan("--operation", "prune")
    assert code == 0
    assert "warning: " in err
    assert "--separator '<|endoftext|>'" in err
    code, _, err = scan("--operation", "prune", "--separator", "<|endoftext|>")
    assert code == 1
    assert "holds a scan of another text" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--operation", "prun"), "did you mean 'prune'?"),
        (("--memory", "lots"), "write e.g. 512MB or 2GB"),
        (("--memory", "1MB"), "use --memory"),
        (("--window", "500"), "use --window 128"),
        (("--window", "1"), "at least 2 tokens"),
        (("--tokens", "5"), "at least one window of 32"),
        (("--separator", ""), "separator is empty"),
    ],
)
def test_bad_options(scan, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = scan(*arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert errors_in(err) == 1
    assert not (tmp_path / "out" / "cells.csv").exists()


def test_bad_data(scan, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
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


def test_bad_models(scan, tiny_checkpoint: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    weights = tiny_checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, _, err = scan()
    assert code == 1
    assert "truncated" in err
    code, _, err = scan(model=str(tmp_path))
    assert code == 1
    assert "has no config.json" in err


def test_a_model_without_a_tokenizer(scan, tiny_checkpoint: Path) -> None:  # type: ignore[no-untyped-def]
    for path in tiny_checkpoint.glob("tokenizer*"):
        path.unlink()
    code, _, err = scan()
    assert code == 1
    assert "tokenizer" in err
    assert errors_in(err) == 1
