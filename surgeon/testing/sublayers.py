"""Edits as equations over a model's own sublayers, without programs and the executor.

Attentions and feed-forwards are taken from the modules that the family describes, and called with the stock model's
arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.language.operations.ladder import ladder
from surgeon.language.operations.merge import merge
from surgeon.language.operations.pair import pair
from surgeon.language.operations.parallel import parallel
from surgeon.language.operations.prune import prune
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.families import SublayerSpec, family_of
from surgeon.models.weights import ModelWeights, ModuleStore

LAYERS = 4  # of the models under contract
_STREAM = object()  # stands in an attention's arguments for the normed stream


def logits_of(model: PreTrainedModel, ids: Tensor, **arguments: Any) -> Tensor:
    """Logits without gradients."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, **arguments).logits
    return logits


def _replace_argument(
    call: tuple[Any, Any], old: object, new: object
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and keywords of a call, with one value in place of another."""
    args, kwargs = call
    found = {name: new if value is old else value for name, value in [*enumerate(args), *kwargs.items()]}
    return [found.pop(place) for place in range(len(args))], found


class Sublayers:
    """A `transformers` model over unpadded tokens, taken apart into its modules; streams are (batch, tokens, hidden).

    Another computation of a model's sublayers has for these tests: one_step, embed, attention, feed_forward, logits,
    averaged, narrowed, experts.

    Args:
        model: which runs no edited program; it is copied.
        ids: the tokens.

    Raises:
        AssertionError: if an attention does not read the output of its norm.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.family = family_of(model.config)
        self.model = copy.deepcopy(model).eval()
        self.ids = ids
        self.calls = [self._call_of_attention(k) for k in range(len(self.layers))]

    @property
    def one_step(self) -> bool:
        """True if attention and feed-forward of a layer read the same stream."""
        return self.family.steps_per_layer == 1

    @property
    def layers(self) -> nn.ModuleList:
        """The model's own."""
        layers = self.model.get_submodule(self.family.layers)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def _run(self) -> Tensor:
        return logits_of(self.model, self.ids, use_cache=False)

    def _call_of_attention(self, k: int) -> tuple[list[Any], dict[str, Any]]:
        spec = self.family.spec("A", k)
        normed = []
        calls = []
        attention = self.layers[k].get_submodule(spec.module)
        hooks = [
            attention.register_forward_pre_hook(
                lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
            ),
            self.layers[k].register_forward_pre_hook(
                lambda *given: normed.append(_stream_in(*given)), with_kwargs=True
            ),
        ]
        before = spec.stages[: spec.stages.index(spec.module)]
        for path in before:
            norm = self.layers[k].get_submodule(path)
            hooks.append(norm.register_forward_hook(lambda _, __, output: normed.append(output)))
        self._run()
        for hook in hooks:
            hook.remove()
        (call,) = calls
        positional, named = _replace_argument(call, normed[-1], _STREAM)
        given = [value for value in (*positional, *named.values()) if value is _STREAM]
        assert len(given) == 1, (
            f"{spec.module} of layer {k} does not read what {' '.join(before) or 'the layer'} gives"
        )
        return positional, named

    def embed(self, ids: Tensor) -> Tensor:
        assert ids is self.ids, "the arguments of attentions are those of other tokens"
        found: list[Tensor] = []
        hook = self.layers[0].register_forward_pre_hook(
            lambda *given: found.append(_stream_in(*given)), with_kwargs=True
        )
        self._run()
        hook.remove()
        return found[0]

    @torch.no_grad()
    def attention(self, k: int, x: Tensor) -> Tensor:
        spec = self.family.spec("A", k)
        normed = self._through(k, spec.stages[: spec.stages.index(spec.module)], x)
        positional, named = _replace_argument(self.calls[k], _STREAM, normed)
        output = self.layers[k].get_submodule(spec.module)(*positional, **named)
        if isinstance(output, tuple):
            output = output[0]
        return self._scale(self._through(k, spec.modules[1:], output))

    @torch.no_grad()
    def feed_forward(self, k: int, x: Tensor) -> Tensor:
        spec: SublayerSpec = self.family.spec("F", k)
        return self._scale(self._through(k, spec.stages, x))

    def _scale(self, output: Tensor) -> Tensor:
        scale = self.family.scales.output(self.model.config)
        if scale is None:
            return output
        return output * scale

    def _through(self, k: int, paths: Iterable[str], x: Tensor) -> Tensor:
        for path in paths:
            output = self.layers[k].get_submodule(path)(x)
            x = output[0].view(x.shape) if isinstance(output, tuple) else output
        return x

    def logits(self, x: Tensor) -> Tensor:
        norm = self.model.get_submodule(self.family.final_norm)
        hook = norm.register_forward_pre_hook(lambda _, __: (x,))
        logits = self._run()
        hook.remove()
        return logits

    @torch.no_grad()
    def averaged(self, layers: list[int], into: int) -> Sublayers:
        """A copy in which one layer has the average of several layers' weights."""
        other = Sublayers(self.model, self.ids)
        parameters = [dict(self.layers[k].named_parameters()) for k in layers]
        for name, parameter in other.layers[into].named_parameters():
            parameter.copy_(torch.stack([one[name] for one in parameters]).mean(0))
        return other

    @torch.no_grad()
    def narrowed(self, k: int, kind: str, count: int) -> Sublayers:
        """A copy in which layer k's attention ("A") or feed-forward ("F") adds nothing of most KV groups or neurons.

        Columns of the projection to the stream are zero for all but `count`: of KV groups those of the largest weights,
        all matrices of a unit together; of neurons those that `torch.randperm` names first.
        """
        other = Sublayers(self.model, self.ids)
        whole = Sublayer(kind, (k,))
        weights = ModelWeights(
            ModuleStore(other.model), self.family, self.family.head_dim(self.model.config)
        )
        projections = self.family.spec(kind, k).projections
        (writing,) = (one for one in projections if not one.reads_stream)
        reading = [weights.matrix(whole, one.role).whole() for one in projections if one.reads_stream]
        by_unit = [matrix.unflatten(0, (weights.stored_width(kind, k), -1)) for matrix in reading]
        columns = (
            weights.matrix(whole, writing.role)
            .whole()
            .T.unflatten(0, (weights.stored_width(kind, k), -1))
        )
        sizes = sum(part.flatten(1).square().sum(1) for part in (*by_unit, columns))
        assert isinstance(sizes, Tensor)
        any_order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(2 * k + 1))
        kept = (sizes.argsort(descending=True) if kind == "A" else any_order)[:count]
        left_out = torch.ones(len(sizes), dtype=torch.bool).index_fill(0, kept, False)
        columns = columns.clone()
        columns[left_out] = 0
        stored = other.layers[k].get_parameter(f"{writing.path}.weight")
        stored.copy_(columns.flatten(0, 1) if writing.transposed else columns.flatten(0, 1).T)
        spec = self.family.spec(kind)
        share = (~left_out).sum() / len(left_out)
        for path, role in spec.feature_norms.items() if spec.joins_heads else ():
            # The norm of all heads takes the mean over those that are kept: all others are zero for it.
            for parameter in other.layers[k].get_submodule(spec.projection(role).path).parameters():
                by_group = parameter.unflatten(0, (len(left_out), -1))
                by_group.mul_((~left_out / share.sqrt()).view(-1, *[1] * (by_group.dim() - 1)))
            other.layers[k].get_parameter(f"{path}.weight").mul_(share.sqrt())
        return other

    @torch.no_grad()
    def experts(self, k: int, kept: tuple[int, ...]) -> Sublayers:
        """A copy in which layer k's mixture has these of its experts."""
        other = Sublayers(self.model, self.ids)
        spec = self.family.spec("F", k)
        assert spec.mixture is not None
        parent, _, name = spec.module.rpartition(".")
        config: Any = copy.deepcopy(self.model.config)
        count = getattr(config, spec.mixture.count)
        setattr(config, spec.mixture.count, len(kept))
        config.num_experts_per_tok = min(config.num_experts_per_tok, len(kept))
        whole = other.layers[k].get_submodule(spec.module)
        fewer = type(whole)(config)
        for path, tensor in fewer.state_dict().items():
            own = whole.state_dict()[path]
            tensor.copy_(own[list(kept)] if len(own) == count else own)
        setattr(other.layers[k].get_submodule(parent), name, fewer.eval())
        return other


def _stream_in(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    stream: Tensor = args[0] if args else kwargs["hidden_states"]
    return stream


def layer(s: Sublayers, k: int, x: Tensor) -> Tensor:
    """The stream after a whole unedited layer."""
    if s.one_step:
        return x + s.attention(k, x) + s.feed_forward(k, x)
    x = x + s.attention(k, x)
    return x + s.feed_forward(k, x)


def sequential(s: Sublayers, x: Tensor, layers: list[int]) -> Tensor:
    """Layers one after the other."""
    for k in layers:
        x = layer(s, k, x)
    return x


def lp(s: Sublayers, x: Tensor) -> Tensor:
    """Layers 1 and 2 as an LP pair."""
    x = layer(s, 0, x)
    if s.one_step:
        x = x + s.attention(1, x) + s.feed_forward(1, x) + s.attention(2, x) + s.feed_forward(2, x)
    else:
        x = x + s.attention(1, x) + s.attention(2, x)
        x = x + s.feed_forward(1, x) + s.feed_forward(2, x)
    return layer(s, 3, x)


def par(s: Sublayers, x: Tensor) -> Tensor:
    """Layers 1 to 3, each with a stream of its own."""
    x = layer(s, 0, x)
    return x + sum(layer(s, k, x) - x for k in (1, 2, 3))


def ladder_from_one(s: Sublayers, x: Tensor) -> Tensor:
    """Ladder Residual, equation 2: x_{i+1} = x_i + h_{i+1}(x_{i-1}) for every step from layer 1 on."""
    steps: list[Callable[[Tensor], Tensor]]
    if s.one_step:
        steps = [partial(_both, s, k) for k in range(LAYERS)]
    else:
        steps = [partial(half, k) for k in range(LAYERS) for half in (s.attention, s.feed_forward)]
    late = len(steps) // LAYERS
    streams = [x]
    for index, step in enumerate(steps):
        read = streams[-1 - (index >= late)]
        streams.append(streams[-1] + step(read))
    return streams[-1]


def _both(s: Sublayers, k: int, x: Tensor) -> Tensor:
    return s.attention(k, x) + s.feed_forward(k, x)


def beside(s: Sublayers, x: Tensor) -> Tensor:
    """Attention and feed-forward of each layer on the same stream."""
    for k in range(LAYERS):
        x = x + _both(s, k, x)
    return x


def one_after_the_other(s: Sublayers, x: Tensor) -> Tensor:
    """The feed-forward of each layer after its attention."""
    for k in range(LAYERS):
        x = x + s.attention(k, x)
        x = x + s.feed_forward(k, x)
    return x


def reorder_layers(program: Program, order: list[int]) -> Program:
    """The layers of a dense program in another order."""
    steps = len(program) // LAYERS
    return Program(tuple(node for k in order for node in program.nodes[k * steps : (k + 1) * steps]))


def two_slices(program: Program) -> Program:
    """Layer 0 in two slices, then layer 1."""
    if len(program) == LAYERS:
        return Program.parse("[A0/2:0 F0/2:0 A0/2:1 F0/2:1] [A1 F1]")
    return Program.parse("[A0/2:0 A0/2:1] [F0/2:0 F0/2:1] A1 F1")


def narrow(program: Program) -> Program:
    """Layer 1 with one KV group, layer 2 with one and with 5 neurons."""
    widths = {Sublayer("A", (1,)): 1, Sublayer("A", (2,)): 1, Sublayer("F", (2,)): 5}
    return program.map_sublayers(lambda one: replace(one, width=widths.get(one)))


def fewer_experts(program: Program) -> Program:
    """Two experts of layer 1's mixture, and three of layer 3's."""
    kept = {Sublayer("F", (1,)): (0, 3), Sublayer("F", (3,)): (0, 1, 3)}
    return program.map_sublayers(lambda one: replace(one, experts=kept.get(one)))


Edit = tuple[Callable[[Program], Program], Callable[[Sublayers, Tensor], Tensor]]
# By name: what is made of the dense program, and the stream that it has to end with.
EDITS: dict[str, Edit] = {
    "dense": (lambda p: p, lambda s, x: sequential(s, x, [0, 1, 2, 3])),
    "shuffle": (lambda p: reorder_layers(p, [0, 2, 1, 3]), lambda s, x: sequential(s, x, [0, 2, 1, 3])),
    "prune": (lambda p: prune(p, range(1, 3)), lambda s, x: sequential(s, x, [0, 3])),
    "repeat": (
        lambda p: reorder_layers(p, [0, 1, 1, 3, 1]),
        lambda s, x: sequential(s, x, [0, 1, 1, 3, 1]),
    ),
    "merge": (
        lambda p: merge(p, range(1, 3)),
        lambda s, x: sequential(s.averaged([1, 2], 1), x, [0, 1, 3]),
    ),
    "lp": (lambda p: pair(p, range(1, 3)), lp),
    "par": (lambda p: parallel(p, range(1, 4)), par),
    "ladder": (lambda p: ladder(p, range(1, 4)), ladder_from_one),
    "attention beside MLP": (lambda _: Program.dense(LAYERS, 1), beside),
    "attention before MLP": (lambda _: Program.dense(LAYERS, 2), one_after_the_other),
    "slices of one layer": (two_slices, lambda s, x: sequential(s, x, [0, 1])),
    "narrow": (
        narrow,
        lambda s, x: sequential(
            s.narrowed(1, "A", 1).narrowed(2, "A", 1).narrowed(2, "F", 5), x, [0, 1, 2, 3]
        ),
    ),
    "experts": (
        fewer_experts,
        lambda s, x: sequential(s.experts(1, (0, 3)).experts(3, (0, 1, 3)), x, [0, 1, 2, 3]),
    ),
}
