"""Native tracks on ranks, of which each has one, several, or a share of one: numbers, collectives, weights, caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from surgeon.exports.in_memory import edit
from surgeon.language.program import Program
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import footprint
from surgeon.training.scratch.tracks import narrow
from tests.runtime.model.conftest import Several
from tests.runtime.on_ranks import held, logits_in_chunks
from tests.tiny_models import VOCABULARY, disturb, tiny_model

LAYERS, DEPTH = 5, 2  # three blocks, the last one shorter
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 176,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"attention_bias": True, "mlp_bias": True},
    "qwen2": SIZES,  # with windows in some layers
    "gemma2": SIZES,
    "gpt_neox": {"hidden_size": 128, "intermediate_size": 176, "num_attention_heads": 8},
    "qwen3_moe": SIZES | {"moe_intermediate_size": 48},
}
CASES = [("llama", 2), ("llama", 4), ("qwen2", 2), ("gemma2", 4), ("gpt_neox", 2), ("qwen3_moe", 2)]
IDS = torch.randint(2, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(3))
CHUNKS = [IDS[:, :6], IDS[:, 6:10], IDS[:, 10:]]  # prefill, several tokens after others, decode
BLOCKS = -(-LAYERS // DEPTH)


class Native(NamedTuple):
    """A model of tracks as a checkpoint, its program, and what one process of `transformers` computes with it."""

    folder: Path
    program: Program
    logits: Tensor


@pytest.fixture(scope="module", params=CASES, ids=str)
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Native:
    family, count = request.param
    config, program = narrow(tiny_model(family, LAYERS, **OVERRIDES[family]).config, count, DEPTH)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    disturb(model)
    folder = tmp_path_factory.mktemp("native")
    edit(model, program).save_pretrained(folder)
    with torch.no_grad():
        return Native(folder, program, model(input_ids=IDS, use_cache=False).logits)


@pytest.mark.sampled
def test_logits_and_collectives(native: Native, several: Several) -> None:
    """Where ranks have whole tracks, all that is sent is an all-reduce for each block, as wide as a track's stream."""
    plan = make_plan(native.folder, several.count, IDS.shape[1])
    assert plan.program == str(native.program)
    answers = several.started.call(logits_in_chunks, plan, CHUNKS)
    for logits, _, _ in answers:
        assert (logits - native.logits).abs().max() / native.logits.abs().max() < 1e-4
    tracks = len(native.program.nodes[0].branches)  # type: ignore[union-attr]
    for chunk, counts in zip(
        CHUNKS, zip(*(counts for _, counts, _ in answers), strict=True), strict=True
    ):
        syncs = native.program.sync_points(several.count)
        assert {count.all_reduces for count in counts} == {syncs}
        assert all(count.all_gathers == 0 for count in counts)
        if tracks >= several.count:
            assert syncs == BLOCKS
            assert {count.bytes for count in counts} == {BLOCKS * chunk.numel() * plan.hidden * 4}


def test_a_rank_has_its_own_tracks_only(native: Native, several: Several) -> None:
    """Weights and keys and values of its tracks; where several ranks share one, a slice of each of its sublayers."""
    plan, ranks = make_plan(native.folder, several.count, IDS.shape[1]), several.count
    tracks = len(native.program.nodes[0].branches)  # type: ignore[union-attr]
    sharers = max(1, ranks // tracks)
    answers = several.started.call(held, plan)
    for rank, (layers, attentions, numbers) in enumerate(answers):
        own = [rank // sharers] if sharers > 1 else list(range(rank, tracks, ranks))
        assert layers == {layer for track in own for layer in layers_of(track, tracks)}
        assert attentions == LAYERS * len(own)
        assert numbers == attentions * 2 * plan.head_dim * kv_heads(native.folder) // sharers
    weights = footprint(plan).weights
    assert len(set(weights)) == 1  # none has more than its share


def layers_of(track: int, tracks: int) -> list[int]:
    """The stored layers of a track: block by block, in a block track by track."""
    found = []
    for start in range(0, LAYERS, DEPTH):
        depth = min(DEPTH, LAYERS - start)
        found += [start * tracks + track * depth + layer for layer in range(depth)]
    return found


def kv_heads(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])
