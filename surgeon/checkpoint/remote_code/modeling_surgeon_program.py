"""A decoder that runs the program in its config's `surgeon_program`, as `surgeon export` writes it.

A decoder is a residual stream x and a list of sublayers that read it and add to it. The program says in which order,
and what each one reads:

    A4  F4           attention and feed-forward of stored layer 4, each with its own norm inside
    A4/8:0           slice 0 of 8 of the heads (of the neurons, for F)
    [A4 A5]          both read the same x, and the sum of their outputs is added
    >A4  >[A4 A5]    a late step: it reads x as it was before the previous step's output was added
    {A4 F4 | A5 F5}  a fork: each branch has a stream of its own, started from x; what all of them added is added to x

The stock model is used as it is, except that its list of layers is replaced by one that runs the program. There are no
layers then whose outputs `output_hidden_states` could collect: it gives an empty tuple.
"""

import copy
import re
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.func import functional_call
from transformers import LlamaForCausalLM, LlamaModel, OPTForCausalLM, OPTModel, Qwen3ForCausalLM, Qwen3Model


class Family(NamedTuple):
    """Where a layer has its two sublayers: a norm, then modules called one after the other."""

    attention: tuple[str, ...]
    feed_forward: tuple[str, ...]
    outputs: tuple[str, ...]  # the projections that write to the stream: a slice takes columns of them, rows of others
    dropout: str | None = None  # the config's probability of dropping sublayer outputs while training


LLAMA = Family(("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp"), ("o_proj", "down_proj"))
OPT = Family(
    ("self_attn_layer_norm", "self_attn"),
    ("final_layer_norm", "fc1", "activation_fn", "fc2"),
    ("out_proj", "fc2"),
    dropout="dropout",
)
FAMILIES = {"llama": LLAMA, "qwen3": LLAMA, "opt": OPT}


class Sublayer(NamedTuple):
    """An attention ("A") or feed-forward ("F") of one stored layer."""

    kind: str
    layer: int
    piece: tuple[int, int] | None  # (index, count) of a slice


class Step(NamedTuple):
    """Sublayers that read the same stream; their outputs are added together."""

    late: bool
    sublayers: list[Sublayer]


class Fork(NamedTuple):
    """Branches with a stream of their own each."""

    branches: list[list[Any]]


TOKEN = re.compile(r"[\[\]{}|>]|[AF]\d+(?:/\d+:\d+)?")


def parse(text: str) -> list[Any]:
    """The steps and forks of a program."""
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
    layer, _, piece = name[1:].partition("/")
    count, _, index = piece.partition(":")
    return Sublayer(name[0], int(layer), (int(index), int(count)) if piece else None)


def sublayers(nodes: list[Any]) -> list[Sublayer]:
    """Every sublayer in the order in which they run."""
    return [
        sublayer
        for node in nodes
        for sublayer in (
            node.sublayers if isinstance(node, Step) else [s for branch in node.branches for s in sublayers(branch)]
        )
    ]


class ProgramLayers(nn.Module):
    """Stands in for the decoder's list of layers, whose parameters keep their names.

    The decoder iterates over it and calls what it gets with the arguments it has for that layer. What it gets is one
    slot per attention of the program; each has a cache of its own. The last slot runs the program.
    """

    def __init__(self, layers: nn.ModuleList, config: Any, nodes: list[Any]) -> None:
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)
        self.config = config
        self.family = FAMILIES[config.model_type]
        self.nodes = nodes
        self.num_slots = max(1, sum(sublayer.kind == "A" for sublayer in sublayers(nodes)))

    def __len__(self) -> int:
        return self.num_slots

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Any:
        arguments: list[dict[str, Any]] = []
        return iter([partial(self.slot, arguments) for _ in range(self.num_slots)])

    def slot(self, arguments: list[dict[str, Any]], stream: Tensor, **given: Any) -> Tensor:
        arguments.append(given)
        if len(arguments) < self.num_slots:
            return stream
        return self.run(self.nodes, stream, enumerate(arguments))[0]

    def run(self, nodes: list[Any], stream: Tensor, slots: Any) -> tuple[Tensor, Tensor]:
        """The stream after the nodes, and the sum of what they added to it."""
        added: Any = 0
        pending: Any = 0  # the previous node's output, not yet in the stream
        for node in nodes:
            late = isinstance(node, Step) and node.late
            before = stream
            stream, added = stream + pending, added + pending
            if isinstance(node, Fork):
                pending = sum(self.run(branch, stream, slots)[1] for branch in node.branches)
            else:
                pending = sum(self.compute(s, before if late else stream, slots) for s in node.sublayers)
        return stream + pending, added + pending

    def compute(self, sublayer: Sublayer, stream: Tensor, slots: Any) -> Tensor:
        """What one sublayer adds to the stream."""
        layer = self.get_submodule(str(sublayer.layer))
        paths = self.family.attention if sublayer.kind == "A" else self.family.feed_forward
        x = getattr(layer, paths[0])(stream)
        for path in paths[1:]:
            module = getattr(layer, path)
            arguments: dict[str, Any] = {}
            if sublayer.kind == "A":
                module.layer_idx, arguments = next(slots)
            if sublayer.piece is None:
                x = module(x, **arguments)
            else:
                x = self.call_slice(module, path, sublayer.piece, x, arguments)
        output: Tensor = x[0] if isinstance(x, tuple) else x
        if self.family.dropout is not None:
            output = nn.functional.dropout(output, getattr(self.config, self.family.dropout), self.training)
        return output

    def call_slice(self, root: Any, path: str, piece: tuple[int, int], x: Tensor, arguments: dict[str, Any]) -> Any:
        """Call a module with one slice of its heads or neurons; a bias added to the stream belongs to slice 0."""
        index, count = piece
        weights = {}
        for name, module in root.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            writes = (name or path) in self.family.outputs
            for key, tensor in module.named_parameters(recurse=False):
                if writes and key == "bias":
                    part = tensor * (index == 0)
                else:
                    part = tensor.chunk(count, dim=1 if writes else 0)[index]
                weights[f"{name}.{key}" if name else key] = part
        heads = getattr(root, "num_heads", None)
        if heads is not None:
            root.num_heads = heads // count
        try:
            return functional_call(root, weights, (x,), arguments)
        finally:
            if heads is not None:
                root.num_heads = heads


class RunsProgram(nn.Module):
    """Comes before a stock model class, and makes it run the program.

    While the model lives, its config has one entry per slot, so that caches and masks fit; in `config.json` it has one
    per stored layer.
    """

    config: Any

    def __init__(self, config: Any) -> None:
        config = copy.deepcopy(config)
        describe_layers(config)
        super().__init__(config)
        decoder: Any = next(m for m in self.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList))
        decoder.layers = ProgramLayers(decoder.layers, config, parse(config.surgeon_program))
        describe_slots(config)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        describe_layers(self.config)
        try:
            return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]
        finally:
            describe_slots(self.config)


def describe_slots(config: Any) -> None:
    """Make the config's per-layer entries describe the program's attentions."""
    used = [sublayer.layer for sublayer in sublayers(parse(config.surgeon_program)) if sublayer.kind == "A"] or [0]
    types = getattr(config, "layer_types", None)
    config.surgeon_stored = {"num_hidden_layers": config.num_hidden_layers, "layer_types": types}
    if types is not None:
        config.layer_types = [types[layer] for layer in used]
    config.num_hidden_layers = len(used)


def describe_layers(config: Any) -> None:
    """Undo `describe_slots`, if it was done."""
    for key, value in config.__dict__.pop("surgeon_stored", {}).items():
        if value is not None:
            setattr(config, key, value)


class ProgramLlamaModel(RunsProgram, LlamaModel):
    """Llama, without its language-model head."""


class ProgramLlamaForCausalLM(RunsProgram, LlamaForCausalLM):
    """Llama, with its language-model head."""


class ProgramQwen3Model(RunsProgram, Qwen3Model):
    """Qwen3, without its language-model head."""


class ProgramQwen3ForCausalLM(RunsProgram, Qwen3ForCausalLM):
    """Qwen3, with its language-model head."""


class ProgramOPTModel(RunsProgram, OPTModel):
    """OPT, without its language-model head."""


class ProgramOPTForCausalLM(RunsProgram, OPTForCausalLM):
    """OPT, with its language-model head."""
