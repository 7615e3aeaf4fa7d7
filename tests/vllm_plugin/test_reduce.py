"""Ranks on GPUs inside vLLM: sums that travel on a stream of their own, on stand-ins that are as late as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from surgeon.checkpoint.stored import Checkpoint
from surgeon.language.execute import State, land
from surgeon.language.program import Program
from surgeon.models.weights import ModelWeights
from surgeon.runtime.comm.collectives import Collectives, Peers
from surgeon.runtime.model.attending import Pass
from surgeon.runtime.model.program import RankProgram
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.placement import Group
from surgeon.runtime.plan.specification import Arithmetic
from tests.tiny_models import tiny_model
from tests.vllm_plugin import fake_streams, fake_vllm

LADDER = "A0 >F0 >A1 >F1 >A2 >F2"
PROGRAMS = {
    "dense": (2, "A0 F0 A1 F1 A2 F2"),
    "ladder": (2, LADDER),
    "pair": (2, "A0 F0 >[A1 A2] >[F1 F2]"),
    "tracks": (2, "{A0 F0 | A1 F1} >A2 >F2"),
    "groups": (4, "{A0 >F0 | A1 >F1} >A2 >F2"),
    "factors": (2, "A0@q5,k3,v4,o6 >F0@gate7,up9,down9 >A1@q4 >F1 A2 F2"),
}
Reduce = Callable[..., Collectives]


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """VLLM's tensor-parallel group of GPUs, with the stream that computes; what connects its ranks is in `connect`."""
    fake_vllm.install(monkeypatch)
    from surgeon.vllm_plugin import reduce

    device = SimpleNamespace(type="cuda")
    found = SimpleNamespace(main=fake_streams.install(monkeypatch), connect=reduce.connect)

    def of(number: int) -> None:
        nccl = fake_vllm.Nccl(range(number), device)
        found.ranks = SimpleNamespace(
            world_size=number,
            rank_in_group=0,
            ranks=range(10, 10 + number),
            device=device,
            all_reduce=nccl.all_reduce,
        )
        found.ranks.device_communicator = SimpleNamespace(pynccl_comm=nccl)

    found.of = of
    monkeypatch.setattr(reduce, "get_tp_group", lambda: found.ranks)
    monkeypatch.setattr(dist, "new_group", lambda members, **_: members)
    yield found
    fake_vllm.forget(monkeypatch)


class Together(Collectives):
    """Ranks that hold the same: every sum is as many times this rank's part, and is there at once."""

    def _connect(self, group: Group) -> Collectives:
        return Together(0, group)

    def _all_reduce(self, tensor: Tensor, _: bool) -> Callable[[], Tensor]:
        return lambda: len(self.group) * tensor

    def _all_gather(self, tensor: Tensor, _: bool) -> Callable[[], Tensor]:
        return lambda: torch.stack([tensor] * len(self.group))


def stream_after(
    folder: Path, name: str, collectives: Collectives, seen: Callable[[int], None]
) -> Tensor:
    """The stream behind a program on the first of its ranks; attentions look at each token alone."""
    ranks, program = PROGRAMS[name]
    plan = replace(
        make_plan(folder, ranks, 32, program, low_rank="gather"), arithmetic=Arithmetic(1e-6, "silu")
    )
    rank = RankProgram(plan, Peers(collectives), torch.device("cpu"))
    rank.load(ModelWeights(Checkpoint(plan.folder), plan.family, plan.head_dim))

    def attend(slot: int, queries: Tensor, keys_values: Tensor, _: Any) -> Tensor:
        seen(slot)
        values = keys_values[:, keys_values.shape[1] // 2 :]
        return values.repeat_interleave(queries.shape[1] // values.shape[1], 1).flatten(1)

    stream = torch.randn(5, plan.hidden, generator=torch.Generator().manual_seed(1))
    return land(rank.run(State(stream), Pass(attend, ()))).stream


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", 3, num_attention_heads=8, num_key_value_heads=4).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_read_before_it_has_come(name: str, side_by_side: Any, folder: Path) -> None:
    ranks, program = PROGRAMS[name]
    side_by_side.of(ranks)
    collectives = side_by_side.connect("auto", Program.parse(program))
    found = stream_after(folder, name, collectives, lambda _: None)
    expected = stream_after(folder, name, Together(0, tuple(range(ranks))), lambda _: None)
    torch.testing.assert_close(found, expected)
    assert (collectives.side is None) == (">" not in program)
    if (
        collectives.side is not None
    ):  # a recording has to hold all that was sent: the stream joins the one that computes
        assert collectives.side.done == len(collectives.side.sent) == len(collectives.side.events) > 0


def test_a_late_step_computes_while_a_sum_travels(side_by_side: Any, folder: Path) -> None:
    side_by_side.of(2)
    collectives = side_by_side.connect("auto", Program.parse(LADDER))
    side, standing = collectives.side, []
    stream_after(folder, "ladder", collectives, lambda _: standing.append((len(side.sent), side.done)))
    assert standing == [(0, 0), (2, 1), (4, 3)]


def test_what_gpus_cannot_do(side_by_side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    side_by_side.of(4)
    monkeypatch.setattr(fake_vllm.Nccl, "disabled", True)
    with pytest.raises(ValueError, match="unset VLLM_DISABLE_PYNCCL"):
        side_by_side.connect("auto", Program.parse(LADDER)).subgroup((0, 1))
