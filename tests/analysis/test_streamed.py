"""Models whose weights are read layer by layer give the same numbers as models in memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.analysis.engine import measure as measure_module
from surgeon.analysis.engine.machine import windows_at_once
from surgeon.analysis.engine.measure import MeasureOptions, by_layer, measure, turn_of
from surgeon.analysis.engine.sharing import Extend, Reach, RunStep, reads, share
from surgeon.checkpoint.tensor_file import FileTensor
from surgeon.language.operations import ladder, merge, pair, parallel, prune, shuffle
from surgeon.language.program import Program
from surgeon.machine import resident_bytes
from surgeon.models.families import family_of
from surgeon.opened import load, load_streamed, streamed_layers
from tests.selection import case
from tests.tiny_models import DENSE_FAMILIES, VOCABULARY, save_checkpoint, tiny_model

IDS = torch.randint(2, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))


def programs(dense: Program, layers: int, merged: bool = True) -> list[Program]:
    whole = range(layers)
    edits: list[Callable[..., Program]] = [shuffle, prune, parallel, pair, ladder, *[merge] * merged]
    stretches = [range(1, 3), range(0, 2), whole[1:]]
    return list(dict.fromkeys(edit(dense, layers=s) for edit in edits for s in stretches))


def numbers(
    model: Any, dense: Program, edited: list[Program], **options: Any
) -> dict[Program, tuple[Any, Any]]:
    found: dict[Program, list[tuple[Any, Any]]] = {}
    for part in measure(model, IDS, share([dense, *edited]), MeasureOptions(2, **options)):
        found.setdefault(part.program, []).append((part.quality["nll"], part.quality["divergence"]))
    return {p: tuple(map(torch.cat, zip(*parts, strict=True))) for p, parts in found.items()}  # type: ignore[misc]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "spilled"),
    [
        case(f, spilled, default=(at + spilled) % 3 == 0)
        for at, f in enumerate((*DENSE_FAMILIES, "qwen3_moe", "mixtral"))
        for spilled in (False, True)
    ],
)
def test_numbers_equal_those_in_memory(
    family: str, spilled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(family, 4).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    in_memory, streamed = load(tmp_path / "model"), load_streamed(tmp_path / "model")
    assert streamed_layers(streamed) is not None
    assert all(p.is_meta == (".layers." in n or ".h." in n) for n, p in streamed.named_parameters())
    dense = Program.dense(4, family_of(in_memory.config).steps_per_layer)
    edited = programs(dense, 4, merged=family in DENSE_FAMILIES)
    if spilled:  # room for no state at all: every one of them goes through a file
        monkeypatch.setattr(measure_module, "streaming_room", lambda *_: (0, 0))
    expected, got = numbers(in_memory, dense, edited), numbers(streamed, dense, edited, folder=tmp_path)
    assert got.keys() == expected.keys() == {dense, *edited}
    for program in expected:
        for ours, theirs in zip(got[program], expected[program], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=5e-7)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_sweeps_run_what_needs_a_layer_together() -> None:
    dense = Program.dense(6)
    plan = share([dense, *programs(dense, 6)])
    ordered = by_layer(plan, dense)
    assert sorted(map(repr, ordered.tasks)) == sorted(map(repr, plan.tasks))
    written = {0}
    for task in ordered.tasks:  # nothing is read before it is written
        assert set(reads(task)) <= written
        if not isinstance(task, Reach):
            written.add(task.target)
    assert next(task for task in ordered.tasks if isinstance(task, Reach)).program == dense
    assert ordered.total_sublayers == plan.total_sublayers

    def sweeps(tasks: Any) -> int:
        """How often the layers are gone through from the first one again."""
        turns = [turn_of(task) for task in tasks if isinstance(task, RunStep | Extend)]
        return sum(later < earlier for earlier, later in pairwise(turns))

    only_prune = share(
        [dense, *(prune(dense, layers=range(a, b)) for a in range(6) for b in range(a + 1, 7))]
    )
    assert sweeps(by_layer(only_prune, dense).tasks) == 0
    assert sweeps(only_prune.tasks) > 10


def test_a_layer_is_read_once_where_memory_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama", 4).save_pretrained(tmp_path)
    model = load_streamed(tmp_path)
    layers = streamed_layers(model)
    assert layers is not None
    read: list[str] = []
    original = FileTensor.read
    monkeypatch.setattr(FileTensor, "read", lambda tensor: read.append(tensor.name) or original(tensor))
    monkeypatch.setattr(measure_module, "streaming_room", lambda *_: (0, 1 << 20))
    dense = Program.dense(4)
    plan = share([dense, *(prune(dense, layers=range(a, a + 1)) for a in range(4))])
    list(measure(model, IDS, plan, MeasureOptions(3)))
    assert len(read) == len(set(read)) == 4 * 9  # two norms and seven matrices of each
    assert [int(name.split(".")[2]) for name in read] == sorted(4 * [0, 1, 2, 3] + 5 * [0, 1, 2, 3])


def test_what_memory_leaves_room_for(tmp_path: Path) -> None:
    tiny_model("llama", 4).save_pretrained(tmp_path)
    model = load_streamed(tmp_path)
    plan = share([Program.dense(4)])
    assert windows_at_once(model, plan, IDS) == 3
    with pytest.raises(
        ValueError, match=r"a memory limit of 1.05 MB is too small: .*; set memory to \d+MB or more"
    ):
        windows_at_once(model, plan, IDS, memory=1 << 20)
    enough = windows_at_once(model, plan, IDS, memory=resident_bytes() + (100 << 20))
    assert enough == 3


def test_edited_checkpoints_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model")
    surgeon.edit(surgeon.load(tmp_path / "model"), "A0 F0 A2 F2").save_pretrained(tmp_path / "edited")
    with pytest.raises(ValueError, match="is an edited model"):
        load_streamed(tmp_path / "edited")
