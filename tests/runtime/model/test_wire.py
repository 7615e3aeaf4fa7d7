"""Values on the wire per token and layer, counted while a rank runs the layer: DeInfer's table 1, recounted.

A sum costs two values for each of its own (to everybody and back), a gathering one. The paper's table, for a layer of
LLaMA-3-70B (h 8192, h_kv 1024, m 28672) with ranks of 60% of the matrices' (4916 and 614):

    Base         4h + 4 h_kv + 4m + 2h                        167,936    as printed
    DeInfer      l_q + l_k + l_v + 2h                          22,528    attention, by the printed formula
                 l_up + l_gate + l_down + 2h                   31,132    feed-forward, by the printed formula
                                                               53,660    their sum; printed are 37,276, with one of
                                                                         the two terms 2h left out, and l_down gathered,
                                                                         which the text has summed
    here         l_q + l_k + l_v + l_up + l_gate               15,976    gathered
                 2 (l_o + l_down)                              19,664    summed in rank space: 35,640 in all
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from surgeon.language.execute import State, land
from surgeon.models.families import FAMILIES
from surgeon.models.weights import ModelWeights, NamedTensors
from surgeon.runtime.comm.collectives import Collectives, Counts, Peers
from surgeon.runtime.model.attending import Pass
from surgeon.runtime.model.program import RankProgram
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Arithmetic, LowRankMode, Plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from tests.runtime.on_ranks import logits_in_chunks

HIDDEN, KV, WIDE = 8192, 1024, 28672
PROGRAM = "A0@q4916,k614,v614,o4916 F0@gate4916,up4916,down4916"
RANKS = 8  # of the paper's machine


class Wire(Collectives):
    """What one rank sends, on no device: values by the paper's rule."""

    def __init__(self) -> None:
        super().__init__(0, tuple(range(RANKS)))
        self.values = 0

    def _connect(self, group: Any) -> Collectives:
        raise AssertionError(f"everybody shares every sublayer, not {group}")

    def _all_reduce(self, tensor: Tensor, _: bool) -> Callable[[], Tensor]:
        self.values += 2 * tensor.numel()
        return lambda: tensor

    def _all_gather(self, tensor: Tensor, _: bool) -> Callable[[], Tensor]:
        self.values += len(self.group) * tensor.numel()
        return lambda: tensor.expand(len(self.group), *tensor.shape)


def plan_for(way: LowRankMode, program: str) -> Plan:
    sizes = {"hidden": HIDDEN, "vocabulary": 8, "layers": 1, "max_tokens": 8, "head_dim": 128}
    return Plan(Path(), FAMILIES["llama"], program, RANKS, tied=True, dtype="float32", low_rank=way, **sizes,
                arithmetic=Arithmetic(1e-5, "silu"))  # fmt: skip


def weights_without_values() -> ModelWeights:
    shapes = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    for path, size in {"self_attn.q": (HIDDEN, HIDDEN), "self_attn.k": (KV, HIDDEN), "self_attn.v": (KV, HIDDEN),
                       "self_attn.o": (HIDDEN, HIDDEN), "mlp.gate": (WIDE, HIDDEN), "mlp.up": (WIDE, HIDDEN),
                       "mlp.down": (HIDDEN, WIDE)}.items():  # fmt: skip
        rank = 614 if size[0] == KV else 4916
        shapes |= {f"{path}_proj.first": (rank, size[1]), f"{path}_proj.second": (size[0], rank)}
    named = {
        f"model.layers.0.{path}.weight": torch.empty(shape, device="meta")
        for path, shape in shapes.items()
    }
    return ModelWeights(NamedTensors(named), FAMILIES["llama"], 128)


@pytest.mark.parametrize(
    ("way", "values"),
    [("base", 167_936), ("gather", 35_640), ("replicate", 19_664)],
)
def test_a_layer_of_the_full_size(way: LowRankMode, values: int) -> None:
    wire = Wire()
    rank = RankProgram(plan_for(way, PROGRAM), Peers(wire), torch.device("meta"))
    rank.load(weights_without_values())
    tokens = 3
    stream = torch.empty(tokens, HIDDEN, device="meta")
    attended = Pass(lambda _, queries, *__: queries.flatten(1), ())
    assert land(rank.run(State(stream), attended)).stream.shape == stream.shape
    assert wire.values == values * tokens
    assert values <= 37_276 or way == "base"


@pytest.mark.thorough
def test_a_sixteenth_of_it_on_ranks_that_talk(tmp_path: Path) -> None:
    """Bytes that two gloo ranks count, of a model a sixteenth as wide in every dimension."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 32}  # k and v are 64 wide
    sizes = {
        "vocab_size": 16,
        "hidden_size": HIDDEN // 16,
        "intermediate_size": WIDE // 16,
        "num_hidden_layers": 1,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path)
    program = "A0@q308,k38,v38,o308 F0@gate308,up308,down308"
    tokens = 4
    with Ranks(RankOptions(2, collectives="gloo")) as ranks:
        for way, gathered, summed in (
            ("gather", 308 + 38 + 38 + 2 * 308, 2 * 308),
            ("base", 0, 2 * 512 + 2 * 64 + 2 * 1792 + 512),
        ):
            plan = make_plan(tmp_path, 2, tokens, program, low_rank=way)
            counts: Counts = ranks.call(
                logits_in_chunks, plan, [torch.zeros(1, tokens, dtype=torch.long)]
            )[0][1][0]
            assert counts.bytes == 4 * tokens * (gathered // 2 + summed), way
