"""A decoder that runs the program in its config's `surgeon_program`, as `surgeon export` writes it.

A decoder is a residual stream x and a list of sublayers that read it and add to it. The program says in which order,
and what each one reads:

    A4  F4           attention and feed-forward of stored layer 4, each with its own norm inside
    A4#3  F4#344     stored layer 4 has 3 KV groups (a KV head with the heads that share it), 344 neurons
    F4!e0,e1         stored layer 4 has two experts, 0 and 1
    A4/8:0           slice 0 of 8 of the heads (of the neurons, for F)
    F4@up64,down96   two factors in place of a matrix: up of rank 64, down of rank 96
    [A4 A5]          both read the same x, and the sum of their outputs is added
    >A4  >[A4 A5]    a late step: it reads x as it was before the previous step's output was added
    {A4 F4 | A5 F5}  a fork: each branch has a stream of its own, started from x; what all of them added is added to x

The stock model is used as it is, except that its list of layers is replaced by one that runs the program. What differs
between architectures stands in its config's `surgeon_family`.

While a model lives, its config has one entry per attention of the program, so that caches and masks fit; written out,
it has one per stored layer. There are no layers whose outputs `output_hidden_states` could collect: it is refused.
Modules are changed while they run (their cache entry, their slice), so threads must not run one model at once.

Where the program is one layer after the other, as in "A0@q64 F0 A1 F1@up64", the stock list of layers stays, and
nothing of the last paragraph holds. Unmodified vLLM runs such a model on its ranks, by the plan that `plan_of` makes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]
from transformers.pytorch_utils import Conv1D

from surgeon.models.replacements import (
    CACHES,
    FactoredLinear,
    FamilyEntry,
    LayerSlots,
    ReplacementExperts,
    TakenApart,
    attention_in,
    by_head,
    called_in,
    factorise,
    has,
    leave_experts,
    linear_slice,
    narrow,
    part,
    set_at,
    through_stages,
)

STOCK: Any = {
    "Model": MODEL_MAPPING,
    "ForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING,
    "ForImageTextToText": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
}


def family_in(config: Any) -> FamilyEntry:
    """Return the architecture that a config describes."""
    row = getattr(config, "surgeon_family", None)
    if not isinstance(row, dict) or set(row) != set(FamilyEntry._fields):
        fields = ", ".join(FamilyEntry._fields)
        raise ValueError(
            f"surgeon_family must describe the architecture by {fields}, not be {str(row)[:200]}"
        )
    entries: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
    }
    return FamilyEntry(**entries)


class Sublayer(NamedTuple):
    """An attention ("A") or feed-forward ("F") of one stored layer."""

    kind: str
    layer: int
    experts: int | None  # how many a mixture has; None for as many as the config says
    width: int | None  # how many KV groups, or neurons, that has; None for as many as the config says
    piece: tuple[int, int] | None  # (index, count) of a slice
    ranks: dict[str, int]  # of projections that two factors stand for


class Step(NamedTuple):
    """Sublayers that read the same stream; their outputs are added together."""

    late: bool
    sublayers: list[Sublayer]


class Fork(NamedTuple):
    """Branches with a stream of their own each."""

    branches: list[list[Any]]


TOKEN = re.compile(
    r"[\[\]{}|>]|[AF]\d+(?:!e\d+(?:,e\d+)*)?(?:#\d+)?(?:/\d+:\d+)?(?:@[a-z]+\d+(?:,[a-z]+\d+)*)?"
)


def parse(text: Any) -> list[Any]:
    """Parse a program's text to steps and forks."""
    if not isinstance(text, str):
        raise ValueError(f"surgeon_program must be a text, as in 'A0 F0 >A1 >F1', not {text!r}")
    tokens = TOKEN.findall(text)
    if "".join(tokens) != "".join(text.split()):
        raise ValueError(f"cannot read surgeon_program {text!r}")
    return _nodes(tokens)


def _nodes(tokens: list[str]) -> list[Any]:
    nodes: list[Any] = []
    while tokens and tokens[0] not in "|}":
        token = tokens.pop(0)
        if token == "{":
            branches = []
            while token != "}":
                branches.append(_nodes(tokens))
                token = tokens.pop(0)
            nodes.append(Fork(branches))
            continue
        late = token == ">"
        inside = [tokens.pop(0) if late else token]
        if inside == ["["]:
            inside = tokens[: tokens.index("]")]
            del tokens[: len(inside) + 1]
        nodes.append(Step(late, [_sublayer(name) for name in inside]))
    return nodes


def _sublayer(name: str) -> Sublayer:
    place, _, ranks = name.partition("@")
    whole, _, piece = place.partition("/")
    chosen, _, width = whole.partition("#")
    layer, _, experts = chosen[1:].partition("!")
    count, _, index = piece.partition(":")
    by_role = {role: int(rank) for role, rank in re.findall(r"([a-z]+)(\d+)", ranks)}
    return Sublayer(
        name[0],
        int(layer),
        len(experts.split(",")) if experts else None,
        int(width) if width else None,
        (int(index), int(count)) if piece else None,
        by_role,
    )


def sublayers(nodes: list[Any]) -> Iterator[Sublayer]:
    """Yield every sublayer in the order in which they run."""
    for node in nodes:
        if isinstance(node, Step):
            yield from node.sublayers
        else:
            for branch in node.branches:
                yield from sublayers(branch)


def in_stock_order(nodes: list[Any], steps: int, layers: int) -> bool:
    """Tell whether the program is the stock decoder's: every layer whole, one after the other."""
    names = [[(kind, layer) for kind in "AF"] for layer in range(layers)]
    stock = names if steps == 1 else [[name] for layer in names for name in layer]
    plain = all(isinstance(node, Step) and not node.late for node in nodes)
    return plain and stock == [
        [(s.kind, s.layer) for s in node.sublayers if s.piece is None] for node in nodes
    ]


class SlicedProjection(nn.Module):
    """Stands in for a projection while a slice of its sublayer runs; a bias added to the stream belongs to slice 0.

    Where there is more to the module than its weight (LoRA, quantised or offloaded weights, hooks), the module itself
    is called, and what it does for other slices is left out.
    """

    def __init__(self, whole: Any, reads: bool, piece: tuple[int, int], shares: tuple[int, ...]) -> None:
        super().__init__()
        self.whole = whole
        self.reads = reads
        self.piece = piece
        self.shares = shares

    def forward(self, x: Tensor) -> Tensor:
        index, count = self.piece
        whole = self.whole
        if is_plain(whole):
            weight = whole.weight.T if isinstance(whole, Conv1D) else whole.weight
            return linear_slice(x, weight, whole.bias, self.piece, 0 if self.reads else 1, self.shares)
        if self.reads:
            # A copy, as OLMo clips it in place, which a view of several may not be where gradients are wanted.
            return part(whole(x), self.piece, self.shares).clone()
        padded = nn.functional.pad(x, (index * x.shape[-1], (count - 1 - index) * x.shape[-1]))
        output: Tensor = whole(padded)
        if index:
            output = output - whole(torch.zeros_like(padded[..., :1, :]))
        return output


CLASSES: dict[Any, type] = {}  # of modules that have factors, by the stock class and by which


def give_own_class(module: nn.Module) -> None:
    """Let a module in which factors stand for projections be of a class of its own, of the same name.

    vLLM looks at one module of a class, and takes the others to have the same projections.
    """
    stock = type(module)
    factored = tuple(
        name for name, child in module.named_children() if isinstance(child, FactoredLinear | TakenApart)
    )
    if factored:
        own = type(stock.__name__, (stock,), {"__module__": stock.__module__})
        module.__class__ = CLASSES.setdefault((stock, factored), own)


def plan_of(layers: nn.ModuleList, path: str, family: FamilyEntry) -> dict[str, str]:
    """Map the layers' projections, by their paths from the model, to the way that tensor-parallel ranks share them.

    What reads the stream has some of its outputs on each rank, what writes to it some of its inputs. Of two factors the
    one on the stream's side is whole on every rank: the outputs of the other are divided, or the sum over ranks of its
    outputs, which are as many as the rank, is taken before it. A projection that is not named is whole, too.
    """
    found: list[dict[str, str]] = []
    for layer in layers:
        found.append({})
        for place in family.reads + family.writes:
            whole, style = ("first", "colwise") if place in family.reads else ("second", "rowwise")
            for name, module in layer.get_submodule(place).named_modules(prefix=place):
                if isinstance(module, nn.Linear) and name.rpartition(".")[2] != whole:
                    found[-1][name] = style
    if all(styles == found[0] for styles in found):
        return {f"{path}.*.{name}": style for name, style in found[0].items()}
    # vLLM takes a name for the beginning of others, and a matrix in one layer may be two factors in another.
    return {
        f"{path}.{k}.{name}": style for k, styles in enumerate(found) for name, style in styles.items()
    }


def is_plain(module: Any) -> bool:
    """Tell whether calling the module is a matrix product with a weight that is there."""
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    linear = type(module) in (nn.Linear, Conv1D) and type(module.weight) is nn.Parameter
    return linear and not changed and not module.weight.is_meta


class ProgramLayers(LayerSlots):
    """Runs the program, with the weights of the stored layers."""

    def __init__(
        self, layers: nn.ModuleList, config: Any, family: FamilyEntry, nodes: list[Any]
    ) -> None:
        super().__init__(layers, family.arguments, family.returns_tuple)
        self.config = config
        self.family = family
        self.nodes = nodes
        # What is packed head by head is one stretch of a slice.
        self.shares = {
            path: tuple(shares) for path, shares in family.packed.items() if path not in family.turns
        }
        attended = [sublayer.layer for sublayer in sublayers(nodes) if sublayer.kind == "A"]
        self.give_slots(attended, all(self.attention(layer)["counted_by"] for layer in attended))

    def attention(self, layer: int) -> dict[str, Any]:
        """Return a layer's kind of attention."""
        return attention_in(self.get_submodule(str(layer)), self.family)

    def run(self, stream: Tensor, arguments: list[dict[str, Any]]) -> Tensor:
        return self.run_nodes(self.nodes, stream, enumerate(arguments))[0]

    def run_nodes(self, nodes: list[Any], stream: Tensor, slots: Any) -> tuple[Tensor, Tensor]:
        """Run nodes; return the stream, and the sum of their additions to it."""
        added: Any = 0
        pending: Any = 0  # the previous node's output, not yet in the stream
        for node in nodes:
            late = isinstance(node, Step) and node.late
            before = stream
            stream = stream + pending
            added = added + pending
            if isinstance(node, Fork):
                pending = sum(self.run_nodes(branch, stream, slots)[1] for branch in node.branches)
            else:
                pending = sum(self.compute(s, before if late else stream, slots) for s in node.sublayers)
        return stream + pending, added + pending

    def compute(self, sublayer: Sublayer, stream: Tensor, slots: Any) -> Tensor:
        """Compute a sublayer's addition to the stream, again in the backward pass under checkpointing."""
        slot, arguments = next(slots) if sublayer.kind == "A" else (None, {})
        if not (self.gradient_checkpointing and self.training):
            return self.output(sublayer, slot, arguments, stream)
        no_cache = {key: None for key in CACHES if key in arguments}
        checkpointed: Any = self._gradient_checkpointing_func
        output: Tensor = checkpointed(partial(self.output, sublayer, slot, arguments | no_cache), stream)
        return output

    def output(
        self, sublayer: Sublayer, slot: int | None, arguments: dict[str, Any], stream: Tensor
    ) -> Tensor:
        layer = self.get_submodule(str(sublayer.layer))
        called = called_in(layer, self.family, sublayer.kind)
        attention = attention_in(layer, self.family)
        renamed = {attention["renamed"].get(name, name): value for name, value in arguments.items()}
        arguments = {name: value for name, value in renamed.items() if name is not None}
        place = None if slot is None else (attention["slot"], slot)
        with self.sliced(layer, called, sublayer.piece):
            x = through_stages(layer, called, attention["module"], place, arguments, stream)
        if self.family.output_scale is not None:
            x = x * self.family.output_scale
        if self.family.dropout is not None:
            x = nn.functional.dropout(x, getattr(self.config, self.family.dropout), self.training)
        output: Tensor = x.to(stream.device)
        return output

    @contextmanager
    def sliced(
        self, layer: nn.Module, roots: tuple[str, ...], piece: tuple[int, int] | None
    ) -> Iterator[None]:
        """While inside, the layer's modules have one slice of their heads or neurons."""
        mixture = self.family.mixture
        others = by_head(self.family) + ([] if mixture is None else [mixture["experts"]])
        all_paths = (*self.family.reads, *self.family.writes, *self.family.counts, *others)
        paths = () if piece is None else all_paths
        here = [path for path in paths if path.startswith(roots) and has(layer, path)]
        before = {path: attrgetter(path)(layer) for path in here}
        try:
            for path, whole in before.items():
                set_at(layer, path, self.narrowed(path, whole, piece))
            yield
        finally:
            for path, whole in before.items():
                set_at(layer, path, whole)

    def narrowed(self, path: str, whole: Any, piece: Any) -> Any:
        """Make the stand-in for a projection or a count while a slice runs."""
        if hasattr(getattr(whole, "weight", None), "placements"):
            raise ValueError(
                "slices are of whole matrices, and tensor parallelism has divided them; leave distributed_config out, "
                "or run the checkpoint on ranks with surgeon generate --tp"
            )
        if path in self.family.counts:
            return whole // piece[1]
        if path in by_head(self.family):
            return part(whole, piece, dim=0)
        if self.family.mixture is not None and path == self.family.mixture["experts"]:
            return ReplacementExperts(whole, self.family.mixture, piece=piece)
        return SlicedProjection(whole, path in self.family.reads, piece, self.shares.get(path, (1,)))


class RunsProgram(nn.Module):
    """Mixin before a stock model class, which makes it run the program."""

    config: Any
    _tp_plan: Any

    def __init__(self, config: Any) -> None:
        whole = copy.deepcopy(config)
        family = family_in(whole)
        entry, place = family.inside or (None, "")
        config = getattr(whole, entry) if entry else whole  # the text decoder's
        for key, value in config.__dict__.pop("surgeon_stored", {}).items():  # undoes `describe_slots`
            setattr(config, key, value)
        super().__init__(whole)
        self.family = family
        decoder = self.get_submodule(place)
        path, layers = next(
            (path, m) for path, m in decoder.named_modules() if isinstance(m, nn.ModuleList)
        )
        path = f"{place}.{path}".removeprefix(".")
        program = parse(whole.surgeon_program)
        if any(one.experts is not None for one in sublayers(program)):
            # The stock class balances as many experts in every layer.
            config.output_router_logits = False
        for sublayer in {(one.kind, one.layer): one for one in sublayers(program)}.values():
            if sublayer.experts is not None and self.family.mixture is not None:
                leave_experts(layers[sublayer.layer], self.family.mixture, sublayer.experts)
            if sublayer.width is not None:
                narrow(layers[sublayer.layer], self.family, sublayer.kind, sublayer.width)
        for sublayer in sublayers(program):
            factorise(layers[sublayer.layer], self.family, sublayer.ranks)
        for module in layers.modules():
            give_own_class(module)
        self._tp_plan = self.planned(path, layers)
        if in_stock_order(program, self.family.steps, len(layers)):
            return
        running = ProgramLayers(layers, config, self.family, program)
        set_at(self, path, running)
        decoder = self.get_submodule(path.rpartition(".")[0])
        decoder.register_forward_pre_hook(self.refuse_collecting, with_kwargs=True)
        describe_slots(config, running)

    def planned(self, path: str, layers: nn.ModuleList) -> dict[str, str]:
        """Return the stock plan for tensor-parallel ranks, with factors in it."""
        stock: dict[str, str] = self._tp_plan or {}
        if self.family.counts or self.family.feature_norms or self.family.mixture is not None:
            # Modules that go by the number, or by the norm, of all heads cannot have those of a rank.
            return stock
        if len(self.family.attentions) > 1:
            return stock  # of which ranks share one kind
        ours = tuple(f"{path}.*.{place}" for place in self.family.reads + self.family.writes)
        return {name: style for name, style in stock.items() if name not in ours} | plan_of(
            layers, path, self.family
        )

    def refuse_collecting(self, decoder: nn.Module, args: Any, given: dict[str, Any]) -> None:  # noqa: ARG002
        """Refuse outputs that only whole layers have."""
        for name in ("output_hidden_states", "output_attentions")[: 1 + self.family.returns_tuple]:
            if given.get(name, getattr(self.config, name, False)):
                raise ValueError(
                    f"{name} is not supported: a model that runs a program has no layers to collect from"
                )


def describe_slots(config: Any, running: ProgramLayers) -> None:
    """Make the config's per-layer entries describe the program's attentions."""
    used = running.slot_layers
    lists = {key: getattr(config, key, None) for key in running.family.layer_lists}
    depth = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    listed = {key: [values[layer] for layer in used] for key, values in lists.items() if values}
    for key, kind in running.attention(used[-1])["counted_by"].items() if running.counts_apart else ():
        listed[key][-1] = kind
    slots = listed | {depth: len(used)}
    config.surgeon_stored = {key: getattr(config, key) for key in slots}
    for key, value in slots.items():
        setattr(config, key, value)


def define_classes(stock: type) -> dict[str, type]:
    """ProgramLlamaConfig, ProgramLlamaModel and ProgramLlamaForCausalLM for LlamaConfig, and so on; those there are.

    The configuration has a model type of its own, so that no stock class loads the checkpoint and ignores the program.
    """
    name = f"Program{stock.__name__.removesuffix('Config')}"

    def to_dict(config: Any) -> dict[str, Any]:
        """Describe the stored layers by the per-layer entries."""
        written: dict[str, Any] = stock.to_dict(config)  # type: ignore[attr-defined]
        for entries in [written, *(one for one in written.values() if isinstance(one, dict))]:
            entries.update(entries.pop("surgeon_stored", {}))
        return written

    model_type = f"surgeon_{stock.model_type}"  # type: ignore[attr-defined]
    own = {"__module__": __name__, "model_type": model_type, "to_dict": to_dict}
    config = type(f"{name}Config", (stock,), own)
    body: Any = {"__module__": __name__, "config_class": config}
    names = {f"{name}{suffix}": mapping[stock] for suffix, mapping in STOCK.items() if stock in mapping}
    return {f"{name}Config": config} | {
        named: type(named, (RunsProgram, model), body) for named, model in names.items()
    }


def __getattr__(name: str) -> Any:
    """Make the classes of an architecture when one of them is first asked for."""
    match = re.fullmatch(r"Program(\w+?)(Config|Model|ForCausalLM|ForImageTextToText)", name)
    stock = f"{match[1]}Config" if match else None
    for model_type, config_name in CONFIG_MAPPING_NAMES.items():
        if config_name == stock:
            globals().update(define_classes(CONFIG_MAPPING[model_type]))
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
