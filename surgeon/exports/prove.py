"""The proof that a checkpoint computes what the program does, on random tokens, in float32.

Two differences are measured, each the largest one between two logits, relative to the largest logit:

    exact    between the edited original and the written form with its weights before they are rounded to 16 bits;
             only float32's own rounding is left, so it must stay below 1e-4
    written  between the edited original and the files as they were written; where weights had to be computed (folded,
             averaged) and are stored in 16 bits, their rounding shows here, and the bound is wider. Those files are
             also compared bit for bit with the weights of the first difference, rounded

Weights stay in their files. The model is built on PyTorch's meta device, by the very class that is to be run. Every
operation on a parameter gets the stored tensor instead, in float32: a linear map a block of rows at a time (blocks side
by side where torch leaves cores idle), an embedding the rows of its tokens. Memory holds a few blocks, whatever the
model's size. Linear maps may have two versions of their weights, one for each half of a batch.
"""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.initialization import no_init_weights

from surgeon.checkpoint.config import open_stored
from surgeon.checkpoint.forms import Form
from surgeon.checkpoint.forms.planning import join_rows
from surgeon.checkpoint.imported import replace_prefix
from surgeon.checkpoint.stored import Checkpoint, StoredModel
from surgeon.checkpoint.tensor_file import PlannedTensor
from surgeon.errors import NotProven
from surgeon.language.program import Program
from surgeon.machine import Stopped, in_order, usable_cores
from surgeon.models.edit import EditedLayers, edit
from surgeon.models.weights import FactorSource, leave_out, make_room, take_experts_apart
from surgeon.opened import Model, check_complete, quiet
from surgeon.progress import Advance

EXACT_TOLERANCE = 1e-4
# Rounding changes each computed weight by up to 2^-9 (bfloat16) or 2^-12 (float16) of itself.
WRITTEN_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BATCH = 2
LENGTH = 64
# A large model has many more weights than a small one that each token goes through, and its proof fewer tokens.
LARGE, LARGE_LENGTH = 1 << 30, 8  # parameters, tokens


@dataclass(frozen=True)
class Proof:
    """Measured differences.

    Attributes:
        tokens: random tokens that both were run on.
        logit_scale: the largest logit of the edited original.
        exact, written: largest logit difference, relative to the scale; before rounding, and as written.
        tolerance: the bound on `written`.
        dtype: of the written weights that had to be rounded, or float32 if none had to.
    """

    tokens: int
    logit_scale: float
    exact: float
    written: float
    tolerance: float
    dtype: str

    @property
    def differ(self) -> str:
        """The differences in words."""
        exact = f"by {self.exact:.1g} of their scale in float32"
        if self.dtype == "float32":
            return exact
        return f"{exact}, and by {self.written:.1g} once computed weights are rounded to {self.dtype}"


@dataclass(frozen=True)
class Reference:
    """Tokens, and the logits that the edited original has on them, (batch, tokens, vocabulary)."""

    tokens: Tensor
    logits: Tensor

    def difference(self, logits: Tensor) -> float:
        """Return the largest difference from these logits, relative to their scale."""
        if logits.shape != self.logits.shape:
            raise NotProven(
                f"logits have the shape {tuple(logits.shape)}, not {tuple(self.logits.shape)}"
            )
        return ((logits - self.logits).abs().max() / self.scale).item()

    @property
    def scale(self) -> float:
        return self.logits.abs().max().item()


def reference_of(
    original: Model,
    program: Program,
    advance: Advance = lambda _: None,
    factors: FactorSource | None = None,
) -> Reference:
    """Run the original with the program, in float32."""
    model, match = original_model(original, program)
    size = sum(parameter.numel() for parameter in model.parameters())
    tokens = random_tokens(model.config, LENGTH if size < LARGE else LARGE_LENGTH)
    edit(model, program, partial(EditedLayers, keeps_derived=False), factors)
    # What is stored is the only version of a tensor, and `zip` makes tuples of one.
    stored = original.checkpoint
    logits = _logits(
        model, tokens, match, stored, lambda name, count: zip(stored[name].rows(count)), advance
    )
    if not logits.isfinite().all():
        raise ValueError(
            "the edited model has logits that are not finite on random tokens; are the weights of "
            f"{original.folder} damaged?"
        )
    return Reference(tokens, logits)


def require_close(found: float, bound: float, said: str, advice: str) -> None:
    """Refuse a difference above its bound; `said` begins the sentence that says so, `advice` ends it."""
    if not found <= bound:  # so that nan is refused too
        raise NotProven(
            f"{said} differ by {found:.2g} of their scale (at most {bound:g} is allowed){advice}"
        )


def require_alike(
    reference: Reference, alive: Callable[[Tensor], Tensor], dtypes: set[torch.dtype]
) -> None:
    """Refuse to export a model in memory that does not compute its own weights and program.

    Args:
        alive: its logits on tokens, in its own dtypes.
        dtypes: of its weights: 16-bit ones are computed in float32 here, and not there.
    """
    tolerance = max(WRITTEN_TOLERANCE.get(dtype, EXACT_TOLERANCE) for dtype in dtypes)
    require_close(
        reference.difference(alive(reference.tokens)),
        tolerance,
        "the model in memory does not compute what its weights and program say: its logits",
        "; is a module of it replaced, or changed by a hook?",
    )


def original_model(
    original: Model, program: Program | None = None, buffers: bool = True
) -> tuple[PreTrainedModel, Match]:
    """Build a model without its weights, and find those.

    Args:
        program: that it is to run, by default its own, which says how narrow stored layers may be.
    """
    kind = type(original.config)
    is_stock = kind in MODEL_FOR_CAUSAL_LM_MAPPING  # or a form's own, of layers as wide as several
    model_class: Any = (
        MODEL_FOR_CAUSAL_LM_MAPPING[kind] if is_stock else original.form.model_class(original)
    )
    with quiet():
        model = build_empty(model_class, copy.deepcopy(original.config), buffers)
    make_room(model, original.weights, program or original.program)
    if original.own is not None:
        leave_out(model, original.weights, original.own)
    match = match_names(model, original)
    check_complete(original.folder, match.misshapen, match.missing)
    return model, match


def random_tokens(config: Any, length: int = LENGTH) -> Tensor:
    """Return tokens for a proof, (batch, tokens), always the same of a vocabulary."""
    tokens = torch.randint(
        config.vocab_size, (BATCH, length), generator=torch.Generator().manual_seed(0)
    )
    return tokens[:, : getattr(config, "max_position_embeddings", length)]


def prove(
    reference: Reference,
    folder: Path,
    form: Form,
    tensors: Sequence[PlannedTensor],
    wait: Callable[[str], None],
    advance: Advance = lambda _: None,
) -> Proof:
    """Compare the files in the folder with the reference.

    Args:
        tensors: as planned.
        wait: until a file of the folder is whole.
        advance: called with the bytes of every tensor when it is first read, in each of the one or two runs.
    """
    checkpoint = Checkpoint(folder)
    # What shape a quantised matrix has may stand in one of its tensors.
    for path in sorted({path for name in checkpoint.quantised for path in checkpoint[name].paths}):
        wait(path.name)
    written_model = open_stored(checkpoint)
    with quiet():
        model = build_empty(*form.written_class(written_model))
    match = match_names(model, written_model)
    for what, which in (("missing", match.missing), ("unexpected", match.unexpected)):
        if which:
            raise NotProven(f"the {form} form has {what} tensors: {', '.join(sorted(which)[:3])}")
    for name, shape, _ in match.misshapen:
        raise NotProven(f"the {form} form has a tensor of a wrong shape: {name}, {shape}")
    rounded = {tensor.name: tensor for tensor in tensors if tensor.rounded}
    versions = _Versions(checkpoint, rounded, wait, set(rounded))
    logits_of = partial(_logits, model, match=match, checkpoint=checkpoint)
    if rounded and _only_linear(model, match, rounded.keys()):
        # One run in which each half of the batch has one version: most of the work is to read and fold the weights.
        tokens = reference.tokens.repeat(2, 1)
        logits = logits_of(tokens, rows=versions.both, advance=lambda size: advance(2 * size))
        exact, written = map(reference.difference, logits.chunk(2))
    else:
        written = reference.difference(
            logits_of(reference.tokens, rows=versions.read_written, advance=advance)
        )
        exact = written
        if rounded:
            logits = logits_of(reference.tokens, rows=versions.exact, advance=advance)
            exact = reference.difference(logits)
    # Tensors that the model does not use (buffers of old checkpoints).
    for name in [*versions.uncompared]:
        deque(versions.compare(name), maxlen=0)
    tolerance = max(
        (WRITTEN_TOLERANCE[tensor.dtype] for tensor in rounded.values()), default=EXACT_TOLERANCE
    )
    for what, found, bound in (
        ("before rounding", exact, EXACT_TOLERANCE),
        ("as written", written, tolerance),
    ):
        advice = ", so nothing was written"
        if exact <= EXACT_TOLERANCE:
            advice += (
                "; what is rounded changes this model that much: store it in float32 (--dtype float32)"
            )
        said = f"the {form} form does not compute what the program does: its logits {what}"
        require_close(found, bound, said, advice)
    dtype = str(next((tensor.dtype for tensor in rounded.values()), torch.float32)).removeprefix(
        "torch."
    )
    return Proof(reference.tokens.numel(), reference.scale, exact, written, tolerance, dtype)


@dataclass(frozen=True)
class _Versions:
    """Rows of written tensors: exactly as planned before rounding, as written, or both.

    Where both are there, they are compared bit for bit. All other tensors are compared when their files are read back
    (`surgeon.checkpoint.tensor_file`).
    """

    checkpoint: Checkpoint
    rounded: Mapping[str, PlannedTensor]
    wait: Callable[[str], None]
    uncompared: set[str]

    def read_written(self, name: str, count: int | None) -> Iterable[Sequence[Tensor]]:
        """Yield rows as written; waits for them."""
        for path in self.checkpoint[name].paths:
            self.wait(path.name)
        return zip(self.checkpoint[name].rows(count))  # the only version

    def both(self, name: str, count: int | None) -> Iterable[Sequence[Tensor]]:
        """Yield rows before rounding and as written, where that makes a difference."""
        if name in self.rounded:
            return self.compare(name)
        return self.read_written(name, count)

    def exact(self, name: str, count: int | None) -> Iterable[Sequence[Tensor]]:
        """Yield rows before rounding."""
        return (rows[:1] for rows in self.both(name, count))

    def compare(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield both, once they are found to be the same but for rounding."""
        stored = self.checkpoint[name]
        for path in stored.paths:
            self.wait(path.name)
        written = stored.read()
        first = 0
        for exact in self.rounded[name].rows():
            own = written[first : first + len(exact)] if exact.dim() else written
            bits = BITS[own.element_size()]  # so that NaNs are equal, and 0 is not -0
            if not torch.equal(exact.to(own.dtype).view(bits), own.view(bits)):
                raise NotProven(
                    f"{name} was written with other values than it should have, so nothing was kept"
                )
            yield exact, own
            first += len(own) if own.dim() else 1
        self.uncompared.discard(name)


def _only_linear(model: PreTrainedModel, match: Match, stored: Set[str]) -> bool:
    """Tell whether the model uses some stored tensors in linear maps only."""
    used = (
        parameter.rpartition(".")[0]
        for parameter, names in match.names.items()
        if not stored.isdisjoint(names)
    )
    return all(type(model.get_submodule(module)).forward is nn.Linear.forward for module in used)


@quiet()
@torch.inference_mode()
def _logits(
    model: PreTrainedModel,
    tokens: Tensor,
    match: Match,
    checkpoint: Checkpoint,
    rows: Callable[[str, int | None], Iterable[Sequence[Tensor]]],
    advance: Advance,
) -> Tensor:
    """Compute logits, (batch, tokens, vocabulary), of a model whose weights are read on demand."""
    unread = {name: checkpoint[name].num_bytes for name in chain.from_iterable(match.names.values())}

    def read(names: tuple[str, ...], count: int | None) -> Iterable[Sequence[Tensor]]:
        for name in names:
            if name in unread:
                advance(unread.pop(name))
            yield from rows(name, count)

    try:
        with WeightsOnDemand(
            model, {parameter: partial(read, names) for parameter, names in match.names.items()}
        ):
            logits: Tensor = model(input_ids=tokens, use_cache=False, return_dict=True).logits
    except (ValueError, OSError, MemoryError, Stopped):
        raise
    except Exception as error:  # config.json may ask for what no class can do
        raise ValueError(
            f"the model that config.json describes cannot be run ({type(error).__name__}: {error})"
        ) from error
    return logits


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
        step = max(1, BLOCK // max(1, weight.shape[1]))
        rows = self.rows[id(weight)](READ_AT_ONCE * step)
        blocks = (
            block for some in rows for block in zip(*(one.split(step) for one in some), strict=True)
        )
        product = partial(_product, x, torch.is_inference_mode_enabled())
        with ThreadPoolExecutor(self.at_once) as pool:
            output = torch.cat(list(in_order(pool, product, blocks, 2 * self.at_once)), dim=-1)
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
        misshapen: stored tensors of another shape than the parameter's, with both shapes.
        unexpected: stored tensors that are no parameter of the model.
    """

    names: dict[str, tuple[str, ...]]
    missing: list[str]
    misshapen: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
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
    matched_names = set(chain.from_iterable(found.values()))
    ignored = (*_ALWAYS_IGNORED, *(model._keys_to_ignore_on_load_unexpected or ()))
    unexpected = [
        name
        for name in store.names()
        if name not in matched_names and not any(re.search(pattern, name) for pattern in ignored)
    ]
    tied = model.all_tied_weights_keys
    for first, second in (*tied.items(), *((source, target) for target, source in tied.items())):
        if second in found:
            found.setdefault(first, found[second])
    missing = [parameter for parameter in parameters if parameter not in found]
    shapes = []
    for parameter, names in found.items():
        wanted = tuple(parameters[parameter].shape)
        shape = store.shape(names[0])
        if len(shape) != len(wanted):  # experts' matrices are stacked in the parameter
            experts = wanted[0]
            shape = (experts, sum(store.shape(name)[0] for name in names) // experts, *shape[1:])
        shapes.append((names[0], shape, wanted))
    misshapen = [(name, own, wanted) for name, own, wanted in shapes if own != wanted]
    return Match(found, missing, misshapen, unexpected)
