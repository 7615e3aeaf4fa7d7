"""What scripts/gpu/rehearse runs, under any build of PyTorch, and what is found where it is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from surgeon.runtime.model.recorded import StaticLayout
from tests.pretended import OnGpu
from tests.scripts.gpu.rehearsal import FAMILIES, parts, passes
from tests.scripts.gpu.stage import PROGRAMS, Stage
from tests.selection import case

# One of each kind by default: the rehearsal itself tries all of them, and so do the costly tests.
FEW = {"ladder over a pair: dynamic passes", "low rank: static passes", "gpt_neo: dynamic passes"}
FEW |= {
    f"{FAMILIES[0]}: captured passes",
    "rank 1 of 2, tracks: captured",
    "inside transformers, ladder over a pair",
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("rehearsal")) as opened:
        yield opened


@pytest.mark.parametrize("name", [case(name, default=name in FEW, id=name) for name in parts()])
def test_a_part(name: str, stage: Stage) -> None:
    counted = parts()[name](stage)
    assert counted
    print(counted)


def test_what_a_gpu_could_not_record_is_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    places = StaticLayout._places

    def waiting(self: StaticLayout, group: int, tokens: torch.Tensor) -> torch.Tensor:
        return places(self, group, tokens) + int(tokens.sum() * 0)

    monkeypatch.setattr(StaticLayout, "_places", waiting)
    with pytest.raises(
        RuntimeError, match="not permitted when stream is capturing: _local_scalar_dense at runtime/"
    ):
        passes(stage, PROGRAMS["dense"], "captured")
    with pytest.raises(AssertionError, match="waits 3 times in a pass"):
        passes(stage, PROGRAMS["dense"], "static")


def test_what_was_recorded_depends_on_its_inputs_only(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that Python computed are those of the recorded pass for ever."""
    made = StaticLayout.__init__

    def fixed(self: StaticLayout, inputs: torch.Tensor, *more: object) -> None:
        made(self, inputs, *more)
        if isinstance(inputs, OnGpu):
            self.positions = OnGpu(inputs.held[:, 1].clone(), inputs.device)

    monkeypatch.setattr(StaticLayout, "__init__", fixed)
    with pytest.raises(AssertionError, match="other tokens"):
        passes(stage, PROGRAMS["dense"], "captured")
