"""The proof that a checkpoint computes what the program does, on random tokens, in float32.

Two differences are measured, each the largest one between two logits, relative to the largest logit:

    exact    between the edited original and the written form with its weights before they are rounded to 16 bits;
             only float32's own rounding is left, so it must stay below 1e-4
    written  between the edited original and the files as they were written; where weights had to be computed (folded,
             averaged) and are stored in 16 bits, their rounding shows here, and the bound is wider. Those files are
             also compared bit for bit with the weights of the first difference, rounded

Weights are read from their files on demand, so that a model of any size is proven in little memory.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from surgeon.checkpoint.config import open_stored
from surgeon.checkpoint.forms import Form, PlannedTensor
from surgeon.checkpoint.load import check_complete, quiet
from surgeon.checkpoint.stored import Checkpoint, StoredModel
from surgeon.errors import NotProven
from surgeon.exports.on_demand import Match, WeightsOnDemand, build_empty, match_names, shape_of
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.machine import Stopped
from surgeon.models.edit import EditedLayers, edit
from surgeon.models.weights import FactorSource, leave_out, make_room
from surgeon.opened import Model
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
    edit(model, program, _DerivedWhenRun, factors)
    # What is stored is the only version of a tensor, and `zip` makes tuples of one.
    stored = original.checkpoint
    logits = _logits(
        model, tokens, match, stored, lambda name, count: zip(stored[name].rows(count)), advance
    )
    reference = Reference(tokens, logits)
    if not reference.logits.isfinite().all():
        raise ValueError(
            "the edited model has logits that are not finite on random tokens; are the weights of "
            f"{original.folder} damaged?"
        )
    return reference


def require_alike(
    reference: Reference, alive: Callable[[Tensor], Tensor], dtypes: set[torch.dtype]
) -> None:
    """Refuse to export a model in memory that does not compute its own weights and program.

    Args:
        alive: its logits on tokens, in its own dtypes.
        dtypes: of its weights: 16-bit ones are computed in float32 here, and not there.
    """
    tolerance = max(WRITTEN_TOLERANCE.get(dtype, EXACT_TOLERANCE) for dtype in dtypes)
    found = reference.difference(alive(reference.tokens))
    if not found <= tolerance:
        raise NotProven(
            f"the model in memory does not compute what its weights and program say: its logits differ by {found:.2g} "
            f"of their scale (at most {tolerance:g} is allowed); is a module of it replaced, or changed by a hook?"
        )


def original_model(
    original: Model, program: Program | None = None, buffers: bool = True
) -> tuple[PreTrainedModel, Match]:
    """Build a model without its weights, and find those.

    Args:
        program: that it is to run, by default its own, which says how narrow stored layers may be.
    """
    kind = type(original.config)
    known = kind in MODEL_FOR_CAUSAL_LM_MAPPING  # or a form's own, of layers as wide as several
    model_class: Any = (
        MODEL_FOR_CAUSAL_LM_MAPPING[kind] if known else original.form.model_class(original)
    )
    with quiet():
        model = build_empty(model_class, copy.deepcopy(original.config), buffers)
    make_room(model, original.weights, program or original.program)
    if original.own is not None:
        leave_out(model, original.weights, original.own)
    match = match_names(model, original)
    wrong = [(match.names[name], model.get_parameter(name)) for name in match.misshapen]
    shapes = [(names[0], shape_of(names, original, like), like.shape) for names, like in wrong]
    check_complete(original.folder, {"mismatched_keys": shapes, "missing_keys": match.missing})
    return model, match


class _DerivedWhenRun(EditedLayers):
    """Derives averages, slices and factors when they run, and drops them then."""

    keeps_derived = False

    def owner(self, sublayer: Sublayer) -> nn.Module:
        if self.is_derived(sublayer):
            return self.derive(sublayer)
        return super().owner(sublayer)


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
    model, match = _written_model(open_stored(checkpoint), form)
    rounded = {tensor.name: tensor for tensor in tensors if tensor.rounded}
    versions = _Versions(checkpoint, rounded, wait, set(rounded))
    logits_of = partial(_logits, model, match=match, checkpoint=checkpoint)
    if rounded and _only_linear(model, match, rounded.keys()):
        # One run in which each half of the batch has one version: most of the work is to read and fold the weights.
        tokens = reference.tokens.repeat(2, 1)

        def twice(size: float) -> None:
            advance(2 * size)

        exact, written = map(
            reference.difference, logits_of(tokens, rows=versions.both, advance=twice).chunk(2)
        )
    else:
        written = reference.difference(
            logits_of(reference.tokens, rows=versions.written, advance=advance)
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
        if not found <= bound:  # so that nan is refused too
            advice = ""
            if exact <= EXACT_TOLERANCE:
                advice = "; what is rounded changes this model that much: store it in float32 (--dtype float32)"
            raise NotProven(
                f"the {form} form does not compute what the program does: its logits {what} differ by "
                f"{found:.2g} of their scale (at most {bound:g} is allowed), so nothing was written{advice}"
            )
    dtype = str(next((tensor.dtype for tensor in rounded.values()), torch.float32)).removeprefix(
        "torch."
    )
    return Proof(reference.tokens.numel(), reference.scale, exact, written, tolerance, dtype)


@dataclass(frozen=True)
class _Versions:
    """Rows of written tensors: exactly as planned before rounding, as written, or both.

    Where both are there, they are compared bit for bit. All other tensors are compared when their files are read back
    (`surgeon.checkpoint.write`).
    """

    checkpoint: Checkpoint
    rounded: Mapping[str, PlannedTensor]
    wait: Callable[[str], None]
    uncompared: set[str]

    def written(self, name: str, count: int | None) -> Iterable[Sequence[Tensor]]:
        """Yield rows as written; waits for them."""
        for path in self.checkpoint[name].paths:
            self.wait(path.name)
        return zip(self.checkpoint[name].rows(count))  # the only version

    def both(self, name: str, count: int | None) -> Iterable[Sequence[Tensor]]:
        """Yield rows before rounding and as written, where that makes a difference."""
        if name in self.rounded:
            return self.compare(name)
        return self.written(name, count)

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


def _written_model(written: StoredModel, form: Form) -> tuple[PreTrainedModel, Match]:
    """Build a checkpoint's class, in its own modeling file if it has one, without its weights."""
    with quiet():
        model = build_empty(*form.written_class(written))
    match = match_names(model, written)
    for what, which in (("missing", match.missing), ("unexpected", match.unexpected)):
        if which:
            raise NotProven(f"the {form} form has {what} tensors: {', '.join(sorted(which)[:3])}")
    for name in match.misshapen:
        stored = match.names[name]
        shape = shape_of(stored, written, model.get_parameter(name))
        raise NotProven(f"the {form} form has a tensor of a wrong shape: {stored[0]}, {shape}")
    return model, match


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
