"""Stand-ins for the parts of vLLM that the plugin uses, for one rank: plain PyTorch over one text, without a cache."""

from __future__ import annotations

import enum
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.vllm_plugin.fake_streams import sent


class Attention(nn.Module):
    """Causal attention over one text, with the arguments of vLLM's."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        cache_config: Any,
        logits_soft_cap: float | None,
        per_layer_sliding_window: int | None,
        prefix: str,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.sinks = sinks
        self.heads, self.kv_heads, self.head_size, self.scale = num_heads, num_kv_heads, head_size, scale
        self.softcap = logits_soft_cap
        self.window = per_layer_sliding_window or cache_config.sliding_window
        self.name = prefix

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert queries.shape[1:] == (self.heads, self.head_size)
        assert keys.shape == values.shape == (len(queries), self.kv_heads, self.head_size)
        keys, values = (
            each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        places = torch.arange(len(queries))
        ages = places[:, None] - places
        hidden = (ages < 0) | (ages >= (self.window or len(queries)))
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks[:, None, None].expand(-1, len(queries), 1)], -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


class VocabParallelEmbedding(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = _parameter(torch.empty(rows, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class ParallelLMHead(nn.Module):
    def __init__(self, rows: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = _parameter(torch.empty(rows, width))
        self.bias = _parameter(torch.empty(rows)) if bias else None

    def tie_weights(self, embedding: VocabParallelEmbedding) -> ParallelLMHead:
        self.weight = embedding.weight
        return self


class LogitsProcessor(nn.Module):
    def __init__(self, rows: int, scale: float = 1.0, soft_cap: float | None = None) -> None:
        super().__init__()
        self.rows, self.scale, self.soft_cap = rows, scale, soft_cap

    def forward(self, head: ParallelLMHead, stream: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = F.linear(stream, head.weight, bias)
        assert logits.shape[1] == self.rows
        capped = logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)
        return capped * self.scale


class IntermediateTensors:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


class CompilationMode(enum.IntEnum):
    NONE = 0
    VLLM_COMPILE = 3


class CUDAGraphMode(enum.Enum):
    NONE = 0
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)


class Nccl:
    """Two or more GPUs that hold the same: sums are as many times this one's part as it has members.

    What is sent by a stream arrives when that stream is waited for (fake_streams.py).
    """

    disabled = False

    def __init__(self, group: Any, device: Any) -> None:  # noqa: ARG002 - as vLLM's
        self.members = len(group)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return sent(lambda total: total.copy_(tensor * self.members), torch.empty_like(tensor))

    def all_gather(self, every: Tensor, tensor: Tensor) -> None:
        sent(lambda every: every.copy_(tensor.expand_as(every)), every)


class Operations:
    """vLLM's compiled ones, which write to the first tensor that they are given.

    Attributes:
        called: their names.
    """

    def __init__(self) -> None:
        self.called: set[str] = set()
        for name, activation in (
            ("silu", F.silu),
            ("gelu", F.gelu),
            ("gelu_tanh", partial(F.gelu, approximate="tanh")),
        ):
            setattr(self, f"{name}_and_mul", partial(self._gate, f"{name}_and_mul", activation))

    def _gate(self, name: str, activation: Any, y: Tensor, wide: Tensor) -> None:
        self.called.add(name)
        assert wide.is_contiguous()
        gate, up = wide.chunk(2, -1)
        y.copy_(activation(gate) * up)

    def rms_norm(self, y: Tensor, x: Tensor, gain: Tensor, epsilon: float) -> None:
        self.called.add("rms_norm")
        assert x.is_contiguous()
        assert gain.dtype == x.dtype
        y.copy_(gain * x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt())

    def rotary_embedding(
        self, positions: Tensor, x: Tensor, other: None, width: int, cache: Tensor, halves: bool
    ) -> None:
        self.called.add("rotary_embedding")
        assert (other, halves, cache.is_contiguous()) == (None, True, True)
        cosine, sine = cache[positions][:, None].chunk(2, -1)
        turned = x.unflatten(1, (-1, width))[..., : cache.shape[1]]
        first, second = (half.clone() for half in turned.chunk(2, -1))
        turned.copy_(torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1))


def _parameter(tensor: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(tensor, requires_grad=False)

    def load(own: nn.Parameter, whole: Tensor) -> None:
        assert own.shape == whole.shape
        own.data.copy_(whole)

    parameter.weight_loader = load  # type: ignore[attr-defined]
    return parameter


def install(monkeypatch: Any) -> SimpleNamespace:
    """Make `import vllm` find the stand-ins; returns the pipeline group, whose rank and size tests may change.

    The compiled operations are `torch.ops._C`.
    """
    monkeypatch.setattr(torch.ops, "_C", Operations(), raising=False)
    base: Any = type("VerifyAndUpdateConfig", (), {})
    stages = SimpleNamespace(rank_in_group=0, world_size=1, is_first_rank=True, is_last_rank=True)
    layers = "vllm.model_executor.layers"
    contents: dict[str, dict[str, Any]] = {
        "vllm._custom_ops": {},
        "vllm.distributed": {
            "get_pp_group": lambda: stages,
            "get_tensor_model_parallel_world_size": lambda: 1,
            "tensor_model_parallel_all_reduce": lambda tensor: tensor,
        },
        "vllm.distributed.parallel_state": {
            "get_tp_group": lambda: SimpleNamespace(world_size=1),
            "in_the_same_node_as": lambda _: [True],
        },
        "vllm.distributed.device_communicators.pynccl": {"PyNcclCommunicator": Nccl},
        "vllm.config": {"CompilationMode": CompilationMode, "CUDAGraphMode": CUDAGraphMode},
        "vllm.model_executor.models.config": {"VerifyAndUpdateConfig": base, "MODELS_CONFIG_MAP": {}},
        f"{layers}.attention": {"Attention": Attention},
        f"{layers}.logits_processor": {"LogitsProcessor": LogitsProcessor},
        f"{layers}.vocab_parallel_embedding": {
            "ParallelLMHead": ParallelLMHead,
            "VocabParallelEmbedding": VocabParallelEmbedding,
        },
        "vllm.sequence": {"IntermediateTensors": IntermediateTensors},
    }
    for path, names in contents.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[path]).update(names)
    forget(monkeypatch)
    return stages


def forget(monkeypatch: Any) -> None:
    """Take back what was imported with the stand-ins, or without them."""
    for own in ("model", "operations", "reduce", "passes"):
        monkeypatch.delitem(sys.modules, f"surgeon.vllm_plugin.{own}", raising=False)


def configuration(folder: Any, **settings: Any) -> SimpleNamespace:
    """As much of vLLM's configuration as the plugin reads."""
    model = SimpleNamespace(model=str(folder), revision=None, max_model_len=32, dtype=torch.float32)
    return SimpleNamespace(
        model_config=model,
        compilation_config=SimpleNamespace(mode=None, cudagraph_mode=None),
        optimization_level=2,
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        cache_config=SimpleNamespace(sliding_window=None),
        quant_config=None,
        additional_config={"surgeon": settings},
    )
