"""A step of training on paper, against sums by hand."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.cost import training_cost
from scripts.cost.training_cost import TrainingLoad, training_step
from surgeon.cost.hardware_file import load_hardware
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes
from surgeon.training import head_loss, logits_loss

CONFIG = LlamaConfig(
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=10_000,
    tie_word_embeddings=True,
)
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LOAD = TrainingLoad(ModelShapes.of("small", CONFIG), Program.dense(4), batch=64, micro_batch=4, window=1024)
H100 = load_hardware("h100-sxm")
LAYER = 2 * 1024**2 + 2 * 1024 * 512 + 3 * 1024 * 2048
PARAMETERS = 4 * LAYER + 10_000 * 1024


def test_one_device_by_hand() -> None:
    assert LOAD.parameters == PARAMETERS
    token = 2 * PARAMETERS + 4 * 4 * 1024 * 512  # each layer's queries and values over half a window of 1,024
    assert LOAD.forward_flops == token
    step = training_step(LOAD, H100, 1)
    layer = 16 * 1024 + 2 * (3 * 1024 + 2 * (1024 + 512)) + 2 * (2 * 1024 + 4 * 2048)
    kept = 4 * 1024 * 4 * layer  # of 4 windows
    written = kept + 4 * 1024 * 10 * 10_000
    products = 3 * token * 64 * 1024 / (989.4e12 * 0.52)
    assert step.computing == pytest.approx(products + 16 * 3 * written / (3.35e12 * 0.92))
    assert step.updating == pytest.approx(28 * PARAMETERS / (3.35e12 * 0.92))
    assert (step.how, step.waiting) == ("ddp", 0)
    assert step.seconds == step.computing + step.updating
    logits = 4 * 1024 * 10_000 * (2 + 8)  # few enough to be there at once
    assert step.memory == 18 * PARAMETERS + 4 * 10_000 * 1024 + kept + 4 * 1024 * 12 * 1024 + logits
    assert step.tokens_per_day == pytest.approx(64 * 1024 / step.seconds * 86400)


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.now, self.most = set[int](), 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in (one for one in tree_iter(made) if isinstance(one, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.there:
                self.there.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return made

    def freed(self, place: int, size: int) -> None:
        self.there.remove(place)
        self.now -= size


@pytest.mark.parametrize(("recomputed", "vocabulary"), [(False, 2000), (True, 200)])
def test_memory_is_what_a_step_allocates(recomputed: bool, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small model in bfloat16 on a CPU, with small chunks of logits; all but weights and what AdamW keeps."""
    monkeypatch.setitem(head_loss.CHUNK_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(logits_loss.BLOCK_BYTES, "cpu", 1 << 19)
    monkeypatch.setattr(training_cost, "CHUNK", 1 << 20)
    monkeypatch.setattr(training_cost, "BLOCK", 1 << 19)
    config = LlamaConfig(**{**CONFIG.to_dict(), **SMALL, "vocab_size": vocabulary})
    load = TrainingLoad(ModelShapes.of("small", config), Program.dense(4), batch=2, micro_batch=2, window=128)
    model = LlamaForCausalLM(config).train()
    if recomputed:
        model.activation_checkpointing_enable()
    ids = torch.randint(0, vocabulary, (2, 128))
    with Allocations() as found:
        for _ in range(2):  # the second has the first one's gradients beside it
            with torch.autocast("cpu", torch.bfloat16):
                loss = head_loss.text_loss(model, {"input_ids": ids, "labels": ids})
            loss.backward()
    expected = training_cost._step(load, H100, 1, sharded=False, recomputed=recomputed).memory
    assert found.most == pytest.approx(expected - 12 * load.parameters, rel=0.1)


def test_logits_are_those_of_the_loss() -> None:
    assert head_loss.CHUNK_BYTES["cuda"] == training_cost.CHUNK
    assert head_loss.LEAST_ROWS == training_cost.LEAST_ROWS
    assert logits_loss.BLOCK_BYTES["cuda"] == training_cost.BLOCK


def test_devices_share_the_batch_and_where_it_must_be_the_model() -> None:
    eight = training_step(LOAD, H100, 8)
    assert eight.computing == pytest.approx(training_step(LOAD, H100, 1).computing / 8)
    tiny, small = (replace(H100, device=replace(H100.device, memory=memory)) for memory in (1.3e9, 1.7e9))
    assert training_step(LOAD, tiny, 1).fits is False
    sharded = training_step(LOAD, small, 8)
    assert (sharded.how, sharded.fits) == ("fsdp", True)
    again = training_step(LOAD, tiny, 8)
    assert again.how == "fsdp, recomputed"
    logits = 2 * 3 * 4 * 1024 * 10 * 10_000 / (3.35e12 * 0.92)  # of two micro-batches; they are not computed again
    assert again.computing - logits == pytest.approx((sharded.computing - logits) * 4 / 3)


def test_what_late_steps_and_pairs_change_nothing_of() -> None:
    for text in (">A0 >F0 >A1 >F1 >A2 >F2 >A3 >F3", "[A0 F0] [A1 F1] [A2 F2] [A3 F3]"):
        assert training_step(replace(LOAD, program=Program.parse(text)), H100, 8) == training_step(LOAD, H100, 8)


def test_a_batch_that_is_not_shared_out() -> None:
    with pytest.raises(ValueError, match="a batch of 64 windows is not shared out to 65 devices; take 1 to 64"):
        training_step(LOAD, H100, 65)
