"""Running a model whose weights stay in their files: each is read when an operation needs it, and dropped after it.

The model is built on PyTorch's meta device, by the very class that is to be run. Every operation on a parameter gets
the stored tensor instead, in float32: a linear map a block of rows at a time (blocks side by side where torch leaves
cores idle), an embedding the rows of its tokens. Memory holds a few blocks, whatever the model's size.

Linear maps may have two versions of their weights, one for each half of a batch, whose common part is read once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from surgeon.checkpoint.forms.planning import join_rows
from surgeon.checkpoint.imported import replace_prefix
from surgeon.checkpoint.stored import StoredModel
from surgeon.machine import in_order, usable_cores
from surgeon.models.weights import take_experts_apart

# Elements of a weight that are held in float32 at a time: they stay in the processor's cache.
BLOCK = 1 << 20
READ_AT_ONCE = 8  # blocks
_ALWAYS_IGNORED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")  # as transformers does


# All rows of a tensor in order, about so many at a time, or at once: of its one version, or of two.
Rows = Callable[[int | None], Iterable[Sequence[Tensor]]]


class WeightsOnDemand(TorchFunctionMode):
    """While it is active, operations on a model's parameters are done on stored tensors.

    Args:
        rows: for each parameter, those of its stored tensor. Two versions are for linear maps, and differ for the two
            halves of a batch; elsewhere the first one counts.
    """

    def __init__(self, model: nn.Module, rows: Mapping[str, Rows]) -> None:
        super().__init__()
        # They are kept, so that nothing else can get the id of one of them.
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.rows = {
            id(parameter): rows[name] for name, parameter in self.parameters.items() if name in rows
        }
        self.at_once = max(1, usable_cores() // torch.get_num_threads())
        self.pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> WeightsOnDemand:
        enter: Any = super().__enter__
        enter()
        self.pool = ThreadPoolExecutor(self.at_once)
        return self

    def __exit__(self, *raised: object) -> None:
        leave: Any = super().__exit__
        leave(*raised)
        assert self.pool is not None
        self.pool.shutdown()

    def __torch_function__(
        self, func: Any, types: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = tuple(args)
        kwargs = kwargs or {}
        # Dtype, shape and the like are those of the parameter itself.
        if getattr(func, "__name__", "") == "__get__":
            found = func(*args, **kwargs)
            stored = id(args[0]) in self.rows
            if stored and isinstance(found, Tensor):  # `weight.T`
                return func(self.whole(args[0]))
            # They are read into memory.
            return torch.device("cpu") if stored and func == _DEVICE else found
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if id(weight) in self.rows and func in _BY_ROWS:
            return _BY_ROWS[func](self, *args, **kwargs)
        args, kwargs = tree_map(self.whole, (args, kwargs))
        return func(*args, **kwargs)

    def whole(self, value: Any) -> Any:
        """Return the stored tensor of a parameter, in float32; any other value as it is."""
        if id(value) not in self.rows:
            return value
        return (
            join_rows([versions[0] for versions in self.rows[id(value)](None)]).float().view(value.shape)
        )

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`functional.linear`, a block of output features at a time, several blocks side by side."""
        assert self.pool is not None
        step = max(1, BLOCK // max(1, weight.shape[1]))
        rows = self.rows[id(weight)](READ_AT_ONCE * step)
        blocks = (
            block for some in rows for block in zip(*(one.split(step) for one in some), strict=True)
        )
        product = partial(_product, x, torch.is_inference_mode_enabled())
        output = torch.cat(list(in_order(self.pool, product, blocks, 2 * self.at_once)), dim=-1)
        if bias is None:
            return output
        if id(bias) not in self.rows:
            return output + bias
        parts = [join_rows(list(version)) for version in zip(*self.rows[id(bias)](None), strict=True)]
        return _by_parts(output, lambda part, own: part + own.float(), parts)

    def embedding(self, ids: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        """`functional.embedding`, reading the rows looked up only."""
        rows, place = ids.unique(return_inverse=True)
        whole = join_rows([versions[0] for versions in self.rows[id(weight)](None)])
        return whole[rows].float()[place]


def _product(x: Tensor, inference: bool, versions: Sequence[Tensor]) -> Tensor:
    with torch.inference_mode(inference), torch.no_grad():  # a thread has modes of its own
        return _by_parts(x, lambda part, block: functional.linear(part, block.float()), versions)


def _by_parts(
    x: Tensor, compute: Callable[[Tensor, Tensor], Tensor], versions: Sequence[Tensor]
) -> Tensor:
    """Compute on equal parts of a batch, each with its own version of something."""
    found = [compute(part, own) for part, own in zip(x.chunk(len(versions)), versions, strict=True)]
    if len(found) == 1:
        return found[0]
    return torch.cat(found)


_DEVICE = Tensor.device.__get__
_BY_ROWS: dict[Any, Any] = {
    functional.linear: WeightsOnDemand.linear,
    functional.embedding: WeightsOnDemand.embedding,
}


def build_empty(model_class: Any, config: Any, buffers: bool = True) -> PreTrainedModel:
    """Build a model without numbers in its parameters (and, unless wanted, buffers), in evaluation mode.

    Raises:
        ValueError: if the configuration describes no model that can be built.
    """
    config._attn_implementation = None  # the class's own choice, whatever the file asks for
    try:
        with (
            no_init_weights(),
            init_empty_weights(include_buffers=False) if buffers else torch.device("meta"),
        ):
            model: PreTrainedModel = model_class(config)
    except Exception as error:  # whatever it trips over is a fault of the configuration
        raise ValueError(
            f"config.json describes no model that can be built ({type(error).__name__}: {error})"
        ) from error
    take_experts_apart(model)
    empty: PreTrainedModel = model.eval()
    return empty


class Match(NamedTuple):
    """A model's parameters and the tensors of a store.

    Attributes:
        names: the stored tensors that each parameter is read from: its rows, one after the other; one, as a rule.
        missing: parameters that are not stored.
        misshapen: those whose stored tensor has another shape.
        unexpected: stored tensors that are no parameter of the model.
    """

    names: dict[str, tuple[str, ...]]
    missing: list[str]
    misshapen: list[str]
    unexpected: list[str]


def match_names(model: PreTrainedModel, stored: StoredModel) -> Match:
    """Find each parameter among stored tensors, as `transformers` does when it loads a model.

    Of tied parameters one is enough; those that are tied, but both stored, become two. Buffers that old models store
    are passed over.
    """
    for path, module in model.named_modules():  # buffers that are stored are read as parameters are
        for name, buffer in [*module.named_buffers(recurse=False)]:
            kept = name not in module._non_persistent_buffers_set and buffer.is_floating_point()
            if kept and stored.weights.names.own(f"{path}.{name}") in stored.checkpoint:
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer.to("meta"), requires_grad=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    store = stored.checkpoint
    paths: dict[str, str | None] = {parameter: parameter for parameter in parameters}
    if store.wrapped is not None and not isinstance(model.config, type(stored.config)):
        # What is around the text decoder no text is computed with.
        places = store.wrapped.wrapper.places
        paths = {parameter: replace_prefix(parameter, places) for parameter in parameters}
        parameters = {
            parameter: tensor for parameter, tensor in parameters.items() if paths[parameter] is not None
        }
    own = (
        (parameter, stored.weights.names.parts(path, parameters[parameter].shape[0]))
        for parameter, path in paths.items()
        if path is not None
    )
    found = {parameter: names for parameter, names in own if all(name in store for name in names)}
    for parameter in found:  # in place of one that several modules may share, its own, without numbers
        path, _, last = parameter.rpartition(".")
        empty = torch.empty_like(parameters[parameter], device="meta")
        setattr(model.get_submodule(path), last, nn.Parameter(empty, requires_grad=False))
    known = set(chain.from_iterable(found.values()))
    ignored = (*_ALWAYS_IGNORED, *(model._keys_to_ignore_on_load_unexpected or ()))
    unexpected = [
        name
        for name in store.names()
        if name not in known and not any(re.search(pattern, name) for pattern in ignored)
    ]
    tied = model.all_tied_weights_keys
    for first, second in (*tied.items(), *((source, target) for target, source in tied.items())):
        if second in found:
            found.setdefault(first, found[second])
    missing = [parameter for parameter in parameters if parameter not in found]
    misshapen = [
        parameter
        for parameter, names in found.items()
        if shape_of(names, stored, parameters[parameter]) != parameters[parameter].shape
    ]
    return Match(found, missing, misshapen, unexpected)


def shape_of(names: tuple[str, ...], stored: StoredModel, like: Tensor) -> tuple[int, ...]:
    """Return the stored shape of a parameter: of one tensor, or of experts' matrices stacked as in it."""
    first = stored.checkpoint.shape(names[0])
    store = stored.checkpoint
    if len(first) == like.dim():
        return first
    experts = like.shape[0]
    return (experts, sum(store.shape(name)[0] for name in names) // experts, *first[1:])
