"""scripts/gpu/rehearse: its parts under any build of PyTorch, and what its table says of one that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scripts.gpu import rehearsal
from scripts.gpu.rehearsal import FAMILIES, parts, passes
from scripts.gpu.stage import PROGRAMS, Stage
from surgeon.runtime.model.static_decode import StaticLayout
from tests.pretended import OnGpu
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
    assert parts()[name](stage)


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


def test_the_table_and_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(_: Stage) -> str:
        raise RuntimeError("two devices\nand more")

    monkeypatch.setattr(rehearsal, "parts", lambda: {"one part": lambda _: "3 tokens", "another": wrong})
    table = tmp_path / "table.txt"
    assert rehearsal.main(["-o", str(table)]) == 1
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert table.read_text().splitlines() == [head, *rows, last]
    assert head.startswith("surgeon ")
    assert [" ".join(row.split()) for row in rows] == [
        "one part 3 tokens 0.0 right",
        "another RuntimeError: two devices 0.0 WRONG",
    ]
    assert last == "1 of 2 parts are right, 1 WRONG"
    assert rehearsal.main(["--only", "one"]) == 0
    with pytest.raises(SystemExit):
        rehearsal.main(["--only", "none of them"])
