"""A run's checkpoints: what they hold, which are kept, disks that are full, files that are damaged."""

from __future__ import annotations

import pickle
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from surgeon.training import trainer
from surgeon.training.checkpoints import checkpoints_of, drop_shared, write_manifest
from tests.training.runs import record, run, same, student, tables, weights

Usage = namedtuple("Usage", "total used free")


def test_a_checkpoint_holds_what_is_trained(tmp_path: Path) -> None:
    model = student(family="gpt2", program="A0 F0 >A1 F1")
    run(tmp_path, model, scope="edited", steps=1)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert 0 < len(trained) < len(list(model.parameters()))
    assert load_file(tmp_path / "checkpoint-1" / "model.safetensors").keys() == trained
    assert not (tmp_path / "checkpoint-1" / "training_args.bin").exists()


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    run(tmp_path / "newest", steps=4)
    assert list(checkpoints_of(tmp_path / "newest")) == [3, 4]
    run(tmp_path / "best", steps=12, patience=3, learning_rate=0.1, evaluate_every=1)
    measured = tables(tmp_path / "best")["held_out"].iloc[1:]
    best, last = (
        int(measured.loc[measured["perplexity"].idxmin(), "step"]),
        int(measured["step"].iloc[-1]),
    )
    assert last == best + 3
    assert list(checkpoints_of(tmp_path / "best")) == [best, last]


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("surgeon.training.trainer.save_file", OSError(28, "No space left on device")),
        (
            "torch.save",
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
        ),
    ],
)
def test_a_full_disk_costs_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    whole = weights(run(tmp_path / "whole"))
    written: Any = trainer.save_file if "save_file" in place else torch.save

    def full(content: Any, path: Any, **options: Any) -> None:
        written(content, path, **options)
        if "checkpoint-3" in str(path):
            raise error

    folder = tmp_path / "full"
    with monkeypatch.context() as patch:
        patch.setattr(place, full)
        with pytest.raises(
            OSError, match=r"disk of .*full filled up at step 3: a checkpoint takes about .* KB; earlier"
        ):
            run(folder)
    assert list(checkpoints_of(folder)) == [1, 2]
    assert not (folder / ".saving").exists()
    assert same(weights(run(folder)), whole)


def test_a_disk_without_room_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = student()
    # Weights and Adam's, three times.
    needed = 3 * 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, needed - 1))
    with pytest.raises(OSError, match=f"is too full: {needed / 1000:.0f} KB are needed"):
        run(tmp_path, model)
    assert not checkpoints_of(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, needed))
    run(tmp_path, student())


@pytest.mark.parametrize("settings", [{}, {"lora": 2, "scope": "edited"}])
def test_mixtures_go_on_where_they_were(tmp_path: Path, settings: dict[str, Any]) -> None:
    program = "A0 F0!e0,e3 A1 F1@up4"
    whole = weights(run(tmp_path / "run", student(family="mixtral", program=program), **settings))
    run(tmp_path / "other", student(family="mixtral", program=program), **settings)
    shutil.rmtree(tmp_path / "other" / "checkpoint-4")
    again = run(tmp_path / "other", student(family="mixtral", program=program), **settings)
    assert same(weights(again), whole)


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def test_a_checkpoint_is_never_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = weights(run(tmp_path / "run", lora=2, scope="edited"))
    run(tmp_path / "other", lora=2, scope="edited")
    last, before = (tmp_path / "other" / f"checkpoint-{step}" for step in (4, 3))
    for name in ("training_args.bin", "optimizer.pt"):
        (last / name).write_bytes(pickle.dumps(Code(), protocol=2))
    write_manifest(last)  # as whoever planted them would
    with pytest.raises(
        ValueError, match=r"checkpoint-4 cannot be read \(.*\); remove it, and the same command"
    ):
        run(tmp_path / "other", lora=2, scope="edited")
    assert not Path("ran").exists()
    shutil.rmtree(last)
    (before / "training_args.bin").write_bytes(pickle.dumps(Code(), protocol=2))
    assert same(weights(run(tmp_path / "other", lora=2, scope="edited")), whole)
    assert not Path("ran").exists()
    assert record(tmp_path / "other")["before"] == record(tmp_path / "run")["before"]


def test_the_best_weights_are_never_replaced_by_the_last_ones(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 12, "patience": 3, "learning_rate": 0.1, "evaluate_every": 1}
    run(tmp_path, **settings)
    best, _ = checkpoints_of(tmp_path).values()
    (best / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=rf"{best.name} has the best weights: model\.safetensors is missing;"
    ):
        run(tmp_path, **settings)
    shutil.rmtree(best)
    with pytest.raises(ValueError, match=rf"{best.name} has the best weights: it is gone; remove"):
        run(tmp_path, **settings)


def test_numbers_that_are_shared_are_stored_once() -> None:
    one = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    stored = drop_shared({"a": one, "b": one, "c": one.t(), "d": torch.zeros(0), "e": torch.zeros(0)})
    assert list(stored) == ["a", "c", "d", "e"]
    assert stored["c"].is_contiguous()
    assert stored["c"].tolist() == one.t().tolist()
