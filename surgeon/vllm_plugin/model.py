"""A program checkpoint as a model of vLLM: every rank runs its part of the program with the one executor.

Embedding, output head and attention with its cache are vLLM's; this package's runtime computes what lies between. KV
heads may differ in number between attentions and ranks (a rank may hold a whole attention of an LP pair), and a cache
has the name of its slot and of that number, so that vLLM finds caches of the same name alike on all ranks.

A pipeline stage runs a part of the program's nodes, and hands on the stream together with what is still to be added.

vLLM's own compiled operations stand for PyTorch's or Triton's: RMS norms, gates, rotary positions. They compute the
same but for where 16 bits are rounded. Layer norms, norms with gains wider than the stream (Gemma2's 1 + weight in 16
bits), norms of heads, and activations without a gate stay, and so do this package's kernels in float32 on CPUs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import vllm._custom_ops  # noqa: F401 - with it PyTorch knows of the operations
from torch import Tensor, nn
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.sequence import IntermediateTensors

from surgeon.checkpoint.stored import Checkpoint
from surgeon.language.execute import State, land
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.families.specs import unit_bounds
from surgeon.models.weights import ModelWeights
from surgeon.runtime.comm.collectives import Peers
from surgeon.runtime.kernels.functions import Weighting
from surgeon.runtime.kernels.triton import Placing
from surgeon.runtime.model.attending import Pass, place_, rotation
from surgeon.runtime.model.ends import Ends, embedded_among, read
from surgeon.runtime.model.layers import FeedForward, Norm, plan_kernels, torch_dtype
from surgeon.runtime.model.mixture import MixtureOfExperts
from surgeon.runtime.model.program import RankProgram
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.placement import require_equal_heads, shared_units
from surgeon.runtime.plan.specification import Plan
from surgeon.vllm_plugin.configs import read_settings, reason_against, stage_nodes
from surgeon.vllm_plugin.reduce import connect

GATES = {
    "silu": "silu_and_mul",
    "swish": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_new": "gelu_tanh_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
}  # by what transformers calls the activation


class CompiledNorm(Norm):
    """An RMS norm by vLLM's operation."""

    def __init__(self, norm: Norm) -> None:
        vars(self).update(vars(norm))

    def add(self, stream: Tensor, output: Tensor) -> Tensor:
        """The sum of a stream and what is added to it, (T, h) each."""
        return stream + output

    def __call__(self, x: Tensor) -> Tensor:
        """The normed stream, (T, h)."""
        x = x.contiguous()
        y = torch.empty_like(x)
        torch.ops._C.rms_norm(y, x, self.gain, self.epsilon)
        return y


def _norm(norm: Norm, dtype: torch.dtype) -> Norm:
    is_alike = norm.rms and norm.gain is not None and norm.gain.dtype == dtype
    if is_alike:
        return CompiledNorm(norm)
    return norm


def _apply_gate(operation: str, wide: Tensor) -> Tensor:
    """Activated gates times values, (T, width), of both, (T, 2 * width), by vLLM's operation of this name."""
    y = wide.new_empty(wide.shape[0], wide.shape[1] // 2)
    getattr(torch.ops._C, operation)(y, wide.contiguous())
    return y


MOST_RECORDED = 512  # tokens of passes that vLLM records by default


class ProgramForCausalLM(nn.Module):
    """The model that vLLM builds on each of its ranks for a program checkpoint."""

    supports_pp = True  # as vLLM asks

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        """Plan what the rank computes and make its caches known; weights are read later, by `load_weights`."""
        super().__init__()
        reason = reason_against(vllm_config)
        if reason is not None:
            raise ValueError(f"surgeon's plugin cannot run this: {reason}")
        settings = read_settings(vllm_config.additional_config)
        plan = plan_of(vllm_config)
        if (why := plan.family.off_vllm) is not None:
            raise ValueError(
                f"surgeon's plugin cannot run this: vLLM runs no program of these attentions: {why}"
            )
        self.stages = get_pp_group()
        nodes = stage_nodes(
            Program.parse(plan.program).nodes, self.stages.rank_in_group, self.stages.world_size
        )
        self.plan = plan
        self.source = ModelWeights(Checkpoint(plan.folder), plan.family, plan.head_dim)
        device = torch.empty(0).device  # vLLM builds models with its own as the default
        program = Program(nodes)
        peers = Peers(connect(settings["reduce"], program))
        self.rank_program = RankProgram(replace(plan, program=str(program)), peers, device)
        attentions = self.rank_program.attentions()
        self.rotaries = [plan.arithmetic.rotary_of(attention) for attention in attentions]
        widths = [self._width(attention) for attention in attentions]
        # Sinks by slot; vLLM's attentions hold on to them, and `load_weights` fills them.
        self.sinks: list[Tensor] = []
        self.slots = nn.ModuleList()
        arithmetic = plan.arithmetic
        scale = arithmetic.attention_scale
        cache = copy.copy(vllm_config.cache_config)
        cache.sliding_window = None  # vLLM's default for attentions that have none of their own
        # vLLM wants a cache on every rank, also where a rank's part of the program has no attention.
        for slot, (heads, kv_heads, window) in enumerate(widths or [(1, 1, None)]):
            more = dict[str, Any]()
            if plan.family.attention.sinks is not None:
                more["sinks"] = torch.empty(heads)
                self.sinks.append(more["sinks"])
            name = f"{prefix}stage{self.stages.rank_in_group}.slots.{slot}"
            attention = Attention(
                heads,
                plan.head_dim,
                plan.head_dim**-0.5 if scale is None else scale,
                num_kv_heads=kv_heads,
                cache_config=cache,
                logits_soft_cap=arithmetic.attention_softcap,
                per_layer_sliding_window=window,
                prefix=f"{name}.kv{kv_heads}window{window}",
                **more,
            )
            self.slots.append(attention)
        first = self.stages.is_first_rank
        last = self.stages.is_last_rank
        if first or (plan.tied and last):
            self.embedding = VocabParallelEmbedding(plan.vocabulary, plan.hidden)
        if last:
            self.head = ParallelLMHead(
                plan.vocabulary, plan.hidden, bias=f"{plan.family.head}.bias" in self.source
            )
            if plan.tied:
                self.head = self.head.tie_weights(self.embedding)
            self.logits_processor = LogitsProcessor(
                plan.vocabulary,
                # After the cap: none has both.
                scale=1.0 if arithmetic.logit_scale is None else arithmetic.logit_scale,
                soft_cap=arithmetic.logit_softcap,
            )
        self.loaded = False

    def _width(self, attention: Sublayer) -> tuple[int, int, int | None]:
        """This rank's heads and KV heads of an attention, and its window."""
        units = shared_units(self.source.units, self.plan.latent)(attention)
        first, end = unit_bounds(units, "heads", attention.piece)
        kv_heads = end - first
        if "kv_heads" in units:
            first_key, end_key = unit_bounds(units, "kv_heads", attention.piece)
            kv_heads = end_key - first_key
        return end - first, kv_heads, self.plan.window(attention)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:  # noqa: ARG002 - would be whole tensors
        """Read this rank's slices from the checkpoint."""
        if self.loaded:
            raise ValueError(
                "surgeon's plugin reads weights from the checkpoint once; start vLLM anew for other ones"
            )
        self.loaded = True
        plan = self.plan
        family = self.plan.family
        device = self.rank_program.device
        self.rank_program.load(self.source)
        # A stage may have no attention.
        for sinks, own in zip(self.sinks, self.rank_program.sinks(), strict=False):
            sinks.copy_(own)

        stored = {"embedding": family.embedding, "head": family.head}
        parameters: Iterable[tuple[str, Any]] = self.named_parameters()
        for name, parameter in parameters:
            end, _, what = name.partition(".")
            parameter.weight_loader(parameter, read(self.source, plan, device, f"{stored[end]}.{what}"))
        self.ends = Ends(self.source, plan, device)
        like = torch.empty(0, dtype=torch_dtype(plan), device=device)
        self.angles = tuple(
            rotation(rotary, plan.max_tokens, like) for rotary in plan.arithmetic.rotaries
        )
        # Cosines and, behind them, sines of all positions, (positions, R), as vLLM's operation wants them.
        self.turns: list[Tensor] = []
        for cosine, sine in self.angles:
            half = cosine.shape[-1] // 2
            self.turns.append(torch.cat([cosine[:, 0, :half], sine[:, 0, half:]], -1).contiguous())
        self.by_kernels = plan_kernels(plan, like) is not None
        if not self.by_kernels:
            # vLLM's operations compute what has been loaded, wherever they compute the same.
            gate = GATES.get(plan.arithmetic.activation)
            self.ends.final_norm = _norm(self.ends.final_norm, like.dtype)
            for sublayer in self.rank_program.sublayers.values():
                if isinstance(sublayer.norm, Norm):
                    sublayer.norm = _norm(sublayer.norm, like.dtype)
                dense = sublayer.shared if isinstance(sublayer, MixtureOfExperts) else sublayer
                if isinstance(dense, FeedForward) and dense.gated and gate is not None:
                    dense.gate = partial(_apply_gate, gate)
        del self.source
        return {name for name, _ in self.named_parameters()}

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings (tokens, hidden), without what is added for positions.

        Each rank looks tokens up among its own rows; the others' give zero. vLLM's own lookup compiles its masks, which
        were wrong on a CPU used like one without AVX-512.
        """
        if self.plan.ranks == 1:
            return self.ends.scale(self.embedding(input_ids))
        shard = self.embedding.shard_indices
        first = shard.org_vocab_start_index
        end = shard.org_vocab_end_index
        own = embedded_among(input_ids, self.embedding.weight[: end - first], first)
        return self.ends.scale(tensor_model_parallel_all_reduce(own))

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """The normed stream after the program, (tokens, hidden), or what the next pipeline stage goes on from."""
        angles = tuple((cosine[positions], sine[positions]) for cosine, sine in self.angles)
        if intermediate_tensors is None:
            stream = inputs_embeds
            if stream is None:
                assert input_ids is not None
                stream = self.embed_input_ids(input_ids)
            state = State(self.ends.add_positions(stream, positions))
        else:
            pending = intermediate_tensors["pending"]
            state = State(intermediate_tensors["stream"], lambda: pending)
        attend_raw = None
        if not self.by_kernels:
            attend_raw = partial(self._attend_raw, positions)
        waits = state.stream.device.type == "cpu" or len(state.stream) > MOST_RECORDED
        state = self.rank_program.run(state, Pass(self._attend, angles, attend_raw, waits))
        if not self.stages.is_last_rank:
            assert state.pending is not None
            return IntermediateTensors({"stream": state.stream, "pending": state.pending()})
        return self.ends.final_norm(land(state).stream)

    def _attend(self, slot: int, queries: Tensor, keys_values: Tensor, _: Weighting) -> Tensor:
        keys, values = keys_values.chunk(2, dim=1)
        attended: Tensor = self.slots[slot](queries, keys, values)
        return attended

    def _attend_raw(
        self,
        positions: Tensor,
        slot: int,
        qkv: Tensor,
        heads: int,
        placing: Placing,
        weighting: Weighting,
    ) -> Tensor:
        kv_heads = (qkv.shape[1] - heads) // 2
        # Queries and keys, (T, heads, D), are normed by head and turned to their positions in place.
        placed = qkv[:, : heads + kv_heads]
        place_(placed, placing._replace(angles=None), heads)
        if placing.angles is not None:
            rotary = self.rotaries[slot]
            assert rotary is not None
            rows = placed.view(len(placed), -1)
            torch.ops._C.rotary_embedding(
                positions, rows, None, placed.shape[-1], self.turns[rotary], True
            )
        return self._attend(slot, qkv[:, :heads], qkv[:, heads:], weighting)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits (tokens, vocabulary) of what `forward` returned."""
        logits: Tensor | None = self.logits_processor(self.head, hidden_states, self.head.bias)
        return logits

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """A stage's inputs in a pass that only measures memory."""
        names = ("stream", "pending")
        size = batch_size, self.plan.hidden
        return IntermediateTensors(
            {name: torch.zeros(size, dtype=dtype, device=device) for name in names}
        )


def plan_of(vllm_config: Any) -> Plan:
    """The plan of the checkpoint that vLLM is to run, on as many ranks as one of its pipeline stages has."""
    model = vllm_config.model_config
    load = vllm_config.load_config
    folder = Path(model.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors"]
        found = snapshot_download(
            model.model, revision=model.revision, cache_dir=load.download_dir, allow_patterns=patterns
        )
        folder = Path(found)
    plan = make_plan(
        folder,
        get_tensor_model_parallel_world_size(),
        model.max_model_len,
        dtype=str(model.dtype).removeprefix("torch."),
        low_rank=read_settings(vllm_config.additional_config)["low_rank"],
        kv="full",  # vLLM's attentions read keys and values out of the cache themselves
    )
    source = ModelWeights(Checkpoint(folder), plan.family, plan.head_dim)
    require_equal_heads(plan, shared_units(source.units, plan.latent))
    if plan.long_texts is not None:  # vLLM says where tokens stand, and not how long their prompts are
        raise ValueError(
            f"rotary positions depend on the length of texts of more than {plan.long_texts.beyond} tokens, which "
            f"surgeon's plugin cannot run; set --max-model-len {plan.long_texts.beyond}"
        )
    return plan
