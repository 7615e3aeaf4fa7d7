"""A sublayer of an architecture: its stages, matrices, experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from surgeon.models.routing import Routing, Scores


@dataclass(frozen=True)
class Latent:
    """The sizes of a latent attention.

    Attributes:
        width: features of a query or key.
        turned: those of them that turn with positions.
        value: features of a value; no more than `width`.
        rank: features of the latent that keys and values are made of.
        query_rank: of the one that queries are made of; None where they are made of the stream.
        neighbours: whether neighbouring features turn as pairs.
    """

    heads: int
    width: int
    turned: int
    value: int
    rank: int
    query_rank: int | None
    neighbours: bool

    def share(self, piece: tuple[int, int] | None) -> slice:
        """The heads of a slice, (index, count)."""
        index, count = piece or (0, 1)
        return slice(self.heads * index // count, self.heads * (index + 1) // count)

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Shapes of matrices, on a stream of so many features, and of the latents' norms, by their modules."""
        made = self.heads * self.width
        expanded = self.heads * (self.width - self.turned + self.value)
        found: dict[str, tuple[int, ...]] = {
            "kv_a_proj_with_mqa": (self.rank + self.turned, hidden),
            "kv_a_layernorm": (self.rank,),
            "kv_b_proj": (expanded, self.rank),
            "o_proj": (hidden, self.heads * self.value),
        }
        if self.query_rank is None:
            return found | {"q_proj": (made, hidden)}
        through = {"q_a_proj": (self.query_rank, hidden), "q_a_layernorm": (self.query_rank,)}
        return found | through | {"q_b_proj": (made, self.query_rank)}

    def products(self, hidden: int, heads: int) -> dict[str, tuple[int, int]]:
        """Shapes of the matrices, (out_features, in_features), that ranks multiply with for so many heads of theirs.

        One matrix reads the stream, and values are as wide as keys.
        """
        queries = heads * self.width
        expanded = heads * (self.width - self.turned + self.value)
        found = {"latents": (self.rank + self.turned + (self.query_rank or queries), hidden)}
        if self.query_rank is not None:
            found["q"] = (queries, self.query_rank)
        return found | {"k v": (expanded, self.rank), "o": (hidden, heads * self.width)}


S = TypeVar("S")
Unit = Literal["heads", "kv_heads", "neurons", "shared_neurons"]
HEADS: Unit = "heads"
NEURONS = ("neurons", "shared_neurons")  # units of one feature each
Units = dict[Unit, int]
Bounds = tuple[int, int]


def unit_bounds(units: Units, unit: Unit, piece: Bounds | None, span: int = 1) -> Bounds:
    """Return first and end of a slice's units of a kind, where slices are as equal as they can be.

    KV groups stay whole where there are as many as slices. Otherwise each slice belongs to one group, whose heads its
    slices share out; those that have some hold the group's KV head, so that several may. A slice may have no units.

    Args:
        units: of the sublayer before it is sliced.
        piece: the slice, (index, count); None for all.
        span: of how many slices, from this one on.
    """
    index, count = piece or (0, 1)
    if span > 1:
        first, _ = unit_bounds(units, unit, (index, count))
        _, end = unit_bounds(units, unit, (index + span - 1, count))
        return first, end
    size = units[unit]
    groups = size
    if unit == "heads":
        groups = units.get("kv_heads", size)
    if count <= groups:
        each = size // groups
        return index * groups // count * each, (index + 1) * groups // count * each
    group = index * groups // count
    first_slice = -(-group * count // groups)
    slices = -(-(group + 1) * count // groups) - first_slice
    each = units.get("heads", size) // groups
    first = group * each + (index - first_slice) * each // slices
    end = group * each + (index - first_slice + 1) * each // slices
    if unit == "kv_heads":
        return group, group + (end > first)
    return first, end


def unit_share(units: Units, unit: Unit, piece: Bounds | None) -> float:
    """Return a slice's part of all units of a kind, those that several slices hold in equal parts."""
    first, end = unit_bounds(units, unit, piece)
    _, count = piece or (0, 1)
    holders = sum(unit_bounds(units, unit, (index, count)) == (first, end) for index in range(count))
    return (end - first) / units[unit] / holders


@dataclass(frozen=True)
class Projection:
    """One linear map of a sublayer.

    Projections of a sublayer that have the same path are packed into one module in the order of the description.

    Attributes:
        role: q, k, v, o, gate, up or down; g where what heads give is gated (Qwen3-Next); of a mixture's shared experts
            shared_gate, shared_up or shared_down.
        path: of the module, from the layer ("self_attn.q_proj").
        unit: of its divided dimension.
        reads_stream: True where it reads the normed stream (slices have some of its output features, rows of the
            weight), False where it writes to the stream (slices have some of its input features, and one has its bias).
        interleaved: packed head by head (GPT-NeoX: q, k and v of head 0, then of head 1), or KV group by KV group
            (Falcon: its heads of q, then k and v), not as whole projections.
        transposed: the weight is stored as (in_features, out_features), as in GPT-2's Conv1D.
        stacked: one matrix for each expert of a mixture; `path` is that of a parameter, (experts, ...), and its bias is
            at `path` with "_bias" behind it.
        stored: where files have the matrices of experts one by one, the path of one, "{}" standing for its number.
    """

    role: str
    path: str
    unit: Unit
    reads_stream: bool = True
    interleaved: bool = False
    transposed: bool = False
    stacked: bool = False
    stored: str | None = None

    @property
    def divided_dim(self) -> int:
        """Dimension of the stored weight, or of one expert's, along which units lie."""
        return int(self.reads_stream == self.transposed)

    @property
    def weight(self) -> str:
        if self.stacked:
            return self.path
        return f"{self.path}.weight"

    @property
    def bias(self) -> str:
        if self.stacked:
            return f"{self.path}_bias"
        return f"{self.path}.bias"


def attention_projections(
    inside: str,
    packed: str | None = None,
    o: str = "o_proj",
    kv: Unit = "kv_heads",
    interleaved: bool = False,
    transposed: bool = False,
) -> tuple[Projection, ...]:
    """The linear maps of an attention.

    Args:
        inside: path of the module that has them.
        packed: what it calls queries, keys and values in one; else they are "q_proj", "k_proj" and "v_proj".
        o: what it calls the output's map.
        kv: what keys and values consist of.
        interleaved: whether the former are packed so.
    """
    reading = (
        Projection(role, f"{inside}.{packed or f'{role}_proj'}", unit, True, interleaved, transposed)
        for role, unit in (("q", HEADS), ("k", kv), ("v", kv))
    )
    return (*reading, Projection("o", f"{inside}.{o}", HEADS, reads_stream=False, transposed=transposed))


def plain_projections(up: str, down: str, transposed: bool = False) -> tuple[Projection, ...]:
    """The linear maps of an MLP without a gate, by their paths."""
    return (
        Projection("up", up, "neurons", transposed=transposed),
        Projection("down", down, "neurons", reads_stream=False, transposed=transposed),
    )


def gated_projections(inside: str, packed: str | None = None) -> tuple[Projection, ...]:
    """The linear maps of a gated MLP; `packed` is what it calls gate and up in one."""
    return (
        Projection("gate", f"{inside}.{packed or 'gate_proj'}", "neurons"),
        Projection("up", f"{inside}.{packed or 'up_proj'}", "neurons"),
        Projection("down", f"{inside}.down_proj", "neurons", reads_stream=False),
    )


def shared_projections(inside: str) -> tuple[Projection, ...]:
    """The linear maps of a mixture's shared experts."""
    return tuple(
        replace(one, role=f"shared_{one.role}", unit="shared_neurons")
        for one in gated_projections(inside)
    )


def stacked_experts(
    inside: str = "mlp.experts", stored: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Projection, ...]:
    """The matrices of gated experts: gate and up packed in one parameter, down in another.

    Args:
        inside: path of the module that has them.
        stored: names of an expert's own in files.
    """
    gate, up, down = (f"{inside}.{{}}.{name}" for name in stored)
    packed = f"{inside}.gate_up_proj"
    return (
        Projection("gate", packed, "neurons", stacked=True, stored=gate),
        Projection("up", packed, "neurons", stacked=True, stored=up),
        Projection("down", f"{inside}.down_proj", "neurons", False, stacked=True, stored=down),
    )


def route_by_config(config: Any, scores: Scores = "softmax", normalise: bool | None = False) -> Routing:
    """Route to as many experts as most configurations say, which also say whether to normalise if that is None."""
    if normalise is None:
        normalise = bool(config.norm_topk_prob)
    return Routing(int(config.num_experts_per_tok), scores, normalise)


@dataclass(frozen=True)
class MixtureSpec:
    """A mixture of experts, beside their matrices.

    Attributes:
        router: path of the module whose weight has a row for each expert.
        experts: path of the module whose parameters are the experts' stacked matrices.
        count: the config attribute that counts a layer's experts.
        routing: of a config.
        counts: attributes (from the layer) that count experts.
        top_k: attributes (from the layer) that count the experts of a token.
        correction: path of the vector that is added to scores where experts are chosen (`route`), if any.
        shared_router: path of the module whose sigmoid weighs what the shared experts give, if any.
        shared: of a config: the neurons of all shared experts, if there are any.
        clamped_gate: of a config: alpha and limit of an expert's clamped gate (gpt-oss).
        weighs_inputs: whether weights are multiplied with what an expert reads (Llama 4), not with what it gives; its
            module gets a copy of all tokens for each expert then, those of one behind those of the other.
        logits: index of the logits among the router's outputs, where it has several.
    """

    router: str
    experts: str
    count: str
    routing: Callable[[Any], Routing]
    counts: tuple[str, ...]
    top_k: tuple[str, ...]
    correction: str | None = None
    shared_router: str | None = None
    shared: Callable[[Any], int] | None = None
    clamped_gate: Callable[[Any], tuple[float, float]] | None = None
    weighs_inputs: bool = False
    logits: int = 0

    @property
    def whole(self) -> dict[str, str]:
        """Paths of parameters that every slice has the whole of, by name: a row, or a number, for each expert."""
        found = {"router.weight": f"{self.router}.weight", "router.bias": f"{self.router}.bias"}
        if self.correction is not None:
            found["router.correction"] = self.correction
        if self.shared_router is None:
            return found
        return found | {"shared_router.weight": f"{self.shared_router}.weight"}


class StreamNorm(str):
    """A stage that norms all of the stream, as the family's `Norms` say: the path of its module."""

    __slots__ = ()


@dataclass(frozen=True)
class Clamp:
    """Clamps queries, keys and values to -bound and bound (OLMo)."""

    bound: float


@dataclass(frozen=True)
class Growth:
    """Multiplies queries at position p by 1 + rate * log(1 + floor((p + ahead) / length)).

    Attributes:
        unturned: whether only those of layers without rotary positions grow. Padding counts as positions then.
    """

    rate: float
    length: int
    ahead: int = 0
    unturned: bool = False


@dataclass(frozen=True)
class HeadNorm:
    """Norms queries and keys.

    Attributes:
        gains: "shared" by all heads, (head_dim,); for "each" of them, (heads, head_dim), in norms of the stream's kind
            (Command R+); "turns", (turns, head_dim), one for each layer whose heads take turns in a fused one;
            "together", one for each feature of all heads, which are normed as one (OLMo2); "none", an L2 norm times the
            root of head_dim in layers with rotary positions (Llama 4); None without such norms.
        queries, keys: paths of the norms.
    """

    gains: Literal["shared", "each", "turns", "together", "none"] | None = "shared"
    queries: str = "self_attn.q_norm"
    keys: str = "self_attn.k_norm"

    @property
    def paths(self) -> dict[str, str]:
        """Paths of the modules that have gains, by name."""
        if self.gains in ("none", None):
            return {}
        return {"q_norm": self.queries, "k_norm": self.keys}


HeadStage = Clamp | Growth | HeadNorm


@dataclass(frozen=True)
class SublayerSpec:
    """One sublayer of a layer.

    Attributes:
        stages: paths of norms of the stream and of modules that compute, in order. The first module of an attention
            gets the decoder's keyword arguments (mask, positions, cache). The output of slices cannot be normed, so
            that a sublayer with a norm behind its modules (Gemma2, OLMo2) is never sliced or fused.
        projections: linear maps.
        heads: stages of queries, keys and values, in order, before they turn with positions and attend.
        counts: attributes (from the first module) that count heads, neurons or their features: less in a slice.
        cache_slot: path of the attribute that says which slot of the cache the attention uses.
        renamed: keyword arguments of the decoder that an attention calls otherwise, by pairs; None for what it lacks.
        counted_by: of an attention whose slot of the cache holds a state and counts no tokens: entries of per-layer
            lists of the config for one that counts them, by pairs.
        beside: paths of parameters that are no projection's and no norm's, as far as they are there.
        sinks: path of a parameter with a number for each head: one more score, whose weight no value has (gpt-oss).
        kept: why programs take no part of such attentions: they are neither sliced nor narrowed, while ranks may share
            their heads.
        apart: why ranks, predictions and vLLM have none of them in programs; `transformers` computes them.
        latent: of a config: the sizes of attentions that make keys and values of a latent, which have no projections.
        numbers: of a config: parameters beside projections, where it is not a latent one.
        width: the config attribute that counts its neurons, where that is not the family's `intermediate`.
        mixture: of experts, if it is one.
    """

    stages: tuple[str, ...]
    projections: tuple[Projection, ...]
    heads: tuple[HeadStage, ...] = ()
    counts: tuple[str, ...] = ()
    cache_slot: str = "self_attn.layer_idx"
    renamed: tuple[tuple[str, str | None], ...] = ()
    counted_by: tuple[tuple[str, Any], ...] = ()
    beside: tuple[str, ...] = ()
    sinks: str | None = None
    kept: str | None = None
    latent: Callable[[Any], Latent] | None = None
    apart: str | None = None
    numbers: Callable[[Any], int] | None = None
    width: str | None = None
    mixture: MixtureSpec | None = None

    @property
    def module(self) -> str:
        """Path of the first module that computes."""
        return next(stage for stage in self.stages if not isinstance(stage, StreamNorm))

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules from the first one that computes."""
        return self.stages[self.stages.index(self.module) :]

    @property
    def stream_norms(self) -> dict[str, str]:
        """Paths of the norms among its stages: "norm" before the modules, "post_norm" behind."""
        first = self.stages.index(self.module)
        norms = [(at, path) for at, path in enumerate(self.stages) if isinstance(path, StreamNorm)]
        return {"norm" if at < first else "post_norm": path for at, path in norms}

    @property
    def norms(self) -> dict[str, str]:
        """Paths of all norms by name, "q_norm" and "k_norm" among them."""
        return self.stream_norms | self.head_norm.paths

    @property
    def norms_output(self) -> bool:
        return "post_norm" in self.stream_norms

    def head_stage(self, kind: type[S]) -> S | None:
        return next((stage for stage in self.heads if isinstance(stage, kind)), None)

    @property
    def head_norm(self) -> HeadNorm:
        return self.head_stage(HeadNorm) or HeadNorm(None)

    @property
    def joins_heads(self) -> bool:
        """Tell whether a stage is of all heads together, so that ranks that share them send each other something."""
        return self.head_norm.gains == "together"

    @property
    def why_whole(self) -> str | None:
        """Parameters or norms that heads have between them, in words, if any."""
        if self.joins_heads:
            return "queries and keys of all heads are normed together"
        if self.head_norm.gains == "each":
            return "norms have a gain for each head of queries and keys"
        return None

    @property
    def others(self) -> dict[str, str]:
        """Paths of parameters that are no projection's and no norm's, by name."""
        found = {path: path for path in self.beside} | (
            {} if self.mixture is None else self.mixture.whole
        )
        if self.sinks is None:
            return found
        return found | {"sinks": self.sinks}

    @property
    def stack_layout(self) -> dict[str, Any]:
        """Layout of a mixture's matrices: "roles" in order, with their parameters' names, "transposed" and "turns"."""
        stacked = [one for one in self.projections if one.stacked]
        return {
            "roles": [[one.role, one.path.rpartition(".")[2]] for one in stacked],
            "transposed": stacked[0].transposed,
            "turns": stacked[0].interleaved,
        }

    @property
    def feature_norms(self) -> dict[str, str]:
        """Paths of norms with a gain for each feature or head of a projection, with its role."""
        if self.head_norm.gains not in ("each", "together"):
            return {}
        return {self.head_norm.queries: "q", self.head_norm.keys: "k"}

    def rename_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Name the decoder's keyword arguments for a layer as the first module does."""
        names = dict(self.renamed)
        called = {names.get(name, name): value for name, value in arguments.items()}
        return {name: value for name, value in called.items() if name is not None}

    def projection(self, role: str) -> Projection:
        """Return the linear map with this role, or raise ValueError naming those there are."""
        for projection in self.projections:
            if projection.role == role:
                return projection
        if not self.projections:
            raise ValueError(
                f"there is no matrix {role!r} of attentions that are kept as they are: {self.kept}"
            )
        raise ValueError(
            f"there is no projection {role!r} here; use {', '.join(p.role for p in self.projections)}"
        )
