"""The proof that a checkpoint computes what the program does, on random tokens, in float32.

Two differences are measured, each the largest one between two logits, relative to the largest logit:

    exact    between the edited original and the written form with its weights before they are rounded to 16 bits;
             nothing but float32's own rounding is left, so it must stay below 1e-4
    written  between the edited original and the files as they were written; where weights had to be computed (folded,
             averaged) and are stored in 16 bits, their rounding shows here, and the bound is wider. Those files are
             also compared bit for bit with the weights of the first difference, rounded

Weights are read from their files when they are needed, so that a model of any size is proven in little memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.utils import logging

from surgeon.beside import Stopped
from surgeon.checkpoint import on_demand
from surgeon.checkpoint.awaited import StoredWhenWhole, WholeFiles
from surgeon.checkpoint.forms import Form, PlannedTensor
from surgeon.checkpoint.load import read_config
from surgeon.checkpoint.on_demand import StoredNames, WeightsOnDemand, build_empty, match_names
from surgeon.checkpoint.read import Checkpoint, Stored
from surgeon.errors import NotProven
from surgeon.language.program import Program, Sublayer
from surgeon.models.edit import edit
from surgeon.models.edited_layers import EditedLayers
from surgeon.models.families import family_of
from surgeon.models.weights import FactorSource, ModelWeights, make_room_for_factors
from surgeon.progress import Advance

EXACT_TOLERANCE = 1e-4
# Rounding changes each computed weight by up to 2^-9 (bfloat16) or 2^-12 (float16) of itself.
WRITTEN_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BATCH, LENGTH = 2, 64
# A large model has many more weights than a small one that each token goes through, and its proof fewer tokens.
LARGE, LARGE_LENGTH = 1 << 30, 8  # parameters, tokens


@dataclass(frozen=True)
class Proof:
    """What was measured.

    Attributes:
        tokens: how many random tokens both were run on.
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


@dataclass(frozen=True)
class Reference:
    """Tokens, and the logits that the edited original has on them, (batch, tokens, vocabulary)."""

    tokens: Tensor
    logits: Tensor

    def difference(self, logits: Tensor) -> float:
        """The largest difference from these logits, relative to their scale."""
        if logits.shape != self.logits.shape:
            raise NotProven(f"logits have the shape {tuple(logits.shape)}, not {tuple(self.logits.shape)}")
        return ((logits - self.logits).abs().max() / self.scale).item()

    @property
    def scale(self) -> float:
        return self.logits.abs().max().item()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep `transformers` from reporting on every load."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def reference_of(
    checkpoint: Checkpoint,
    config: Any,
    program: Program,
    advance: Advance = lambda _: None,
    factors: FactorSource | None = None,
) -> Reference:
    """Run the original with the program, in float32.

    Args:
        config: its `transformers` configuration.
        factors: of matrices that the program has a rank for.
        advance: told of the bytes of every stored tensor when it is first read.

    Raises:
        ValueError: if a tensor is missing or has another shape than the configuration asks for, or logits are not
            finite.
    """
    model, names = original_model(checkpoint, config)
    size = sum(parameter.numel() for parameter in model.parameters())
    tokens = random_tokens(model.config, LENGTH if size < LARGE else LARGE_LENGTH)
    stored = {name: Stored(checkpoint, of) for name, of in names.by_parameter.items()}
    edit(model, program, _DerivedWhenRun, factors)
    reference = Reference(tokens, _logits(model, tokens, stored, _told(checkpoint, stored, advance)))
    if not reference.logits.isfinite().all():
        raise ValueError(
            "the edited model has logits that are not finite on random tokens; are the weights of "
            f"{checkpoint.folder} damaged?"
        )
    return reference


def require_alike(reference: Reference, alive: Callable[[Tensor], Tensor], dtypes: set[torch.dtype]) -> None:
    """Refuse to export what a model in memory does not compute.

    Args:
        alive: its logits on tokens, in its own dtypes.
        dtypes: of its weights: 16-bit ones are computed in float32 here, and not there.

    Raises:
        NotProven: if its logits differ from the reference by more than rounding can explain.
    """
    tolerance = max(WRITTEN_TOLERANCE.get(dtype, EXACT_TOLERANCE) for dtype in dtypes)
    found = reference.difference(alive(reference.tokens))
    if not found <= tolerance:
        raise NotProven(
            f"the model in memory does not compute what its weights and program say: its logits differ by {found:.2g} "
            f"of their scale (at most {tolerance:g} is allowed); is a module of it replaced, or changed by a hook?"
        )


def original_model(checkpoint: Checkpoint, config: Any, buffers: bool = True) -> tuple[PreTrainedModel, StoredNames]:
    """A checkpoint's model without its weights, and where those are.

    Raises:
        ValueError: if a tensor is missing or has another shape than the configuration asks for.
    """
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with _quiet():
        model = build_empty(model_class, copy.deepcopy(config), buffers)
    family = family_of(config)
    make_room_for_factors(model, ModelWeights(checkpoint, family, family.head_dim(config)))
    names = match_names(model, checkpoint, family)
    for name, stored in names.by_parameter.items():
        shape, expected = checkpoint.shape(stored), tuple(model.get_parameter(name).shape)
        if shape != expected:
            raise ValueError(
                f"{checkpoint.folder}: tensor {stored} has the shape {shape}, but config.json asks for {expected}"
            )
    if names.missing:
        more = "" if len(names.missing) == 1 else f" and {len(names.missing) - 1} more"
        raise ValueError(f"{checkpoint.folder} lacks a tensor of its model: {names.missing[0]}{more}")
    return model, names


class _DerivedWhenRun(EditedLayers):
    """Derives averages, slices and factors when they run, and drops them then."""

    keeps_derived = False

    def owner(self, sublayer: Sublayer) -> nn.Module:
        return self.derive(sublayer) if self.is_derived(sublayer) else super().owner(sublayer)


def random_tokens(config: Any, length: int = LENGTH) -> Tensor:
    """Tokens to prove something on, (batch, tokens), always the same of a vocabulary."""
    tokens = torch.randint(config.vocab_size, (BATCH, length), generator=torch.Generator().manual_seed(0))
    return tokens[:, : getattr(config, "max_position_embeddings", length)]


def prove(
    reference: Reference,
    folder: Path,
    form: Form,
    tensors: list[PlannedTensor],
    whole: WholeFiles,
    advance: Advance = lambda _: None,
) -> Proof:
    """Compare what is written in the folder with the reference.

    Args:
        whole: which of the folder's files are; they are waited for.
        advance: told of the bytes of every tensor when it is first read, in each of the one or two runs, of which the
            latter may be made as one.

    Raises:
        Stopped: if a file will never be whole.
        NotProven: if the logits differ by more than rounding can explain.
    """
    rounded = {tensor.dtype for tensor in tensors if tensor.rounded}
    tolerance = max((WRITTEN_TOLERANCE[dtype] for dtype in rounded), default=EXACT_TOLERANCE)
    run = _WrittenForm(Checkpoint(folder), form, whole, advance)
    before = {tensor.name: _BothRoundings(tensor, run.stored[tensor.name]) for tensor in tensors if tensor.rounded}
    if not before:
        exact = written = reference.difference(run.logits(reference.tokens))
    elif run.maps_only(before):
        halves = run.logits(reference.tokens.repeat(2, 1), before, runs=2).chunk(2)
        exact, written = map(reference.difference, halves)
    else:
        written = reference.difference(run.logits(reference.tokens))
        first = {name: _FirstVersion(one) for name, one in before.items()}
        exact = reference.difference(run.logits(reference.tokens, first))
    for value in before.values():
        value.compare_unread()
    for name, found, bound in (("before rounding", exact, EXACT_TOLERANCE), ("as written", written, tolerance)):
        if not found <= bound:  # so that nan is refused too
            raise NotProven(
                f"the {form} form does not compute what the program does: its logits {name} differ by "
                f"{found:.2g} of their scale (at most {bound:g} is allowed), so nothing was written"
            )
    dtype = str(next(iter(rounded), torch.float32)).removeprefix("torch.")
    return Proof(reference.tokens.numel(), reference.scale, exact, written, tolerance, dtype)


class _BothRoundings:
    """A tensor before it is rounded and as it was written, compared bit for bit when it is read.

    Other tensors are compared by whoever reads their files back (write.py).
    """

    def __init__(self, planned: PlannedTensor, written: StoredWhenWhole) -> None:
        self.planned = planned
        self.written = written
        self.compared = False

    def compare_unread(self) -> None:
        """Check values that the model did not use (buffers of old checkpoints)."""
        if not self.compared:
            self.tensor()

    def tensor(self) -> Tensor:
        """Before it is rounded."""
        value = self.planned.build()
        self._check(value, self.written.tensor())
        self.compared = True
        return value

    def rows(self, count: int) -> Iterator[Tensor]:
        """Before they are rounded."""
        return (value for value, _ in self.both(count))

    def both(self, _: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows before they are rounded, as many at a time as are computed together, and as they were written."""
        written, first = self.written.tensor(), 0
        for value in self.planned.rows():
            own = written[first : first + len(value)]
            self._check(value, own)
            yield value, own
            first += len(value)
        self.compared = True

    def _check(self, value: Tensor, written: Tensor) -> None:
        bits = BITS[written.element_size()]  # so that NaNs are equal, and 0 is not -0
        if not torch.equal(value.to(written.dtype).view(bits), written.view(bits)):
            raise NotProven(
                f"{self.planned.name} was written with other values than it should have, so nothing was kept"
            )


@dataclass(frozen=True)
class _FirstVersion:
    """What both roundings are of, where all of a batch gets that."""

    of: _BothRoundings

    def tensor(self) -> Tensor:
        return self.of.tensor()

    def rows(self, count: int) -> Iterator[Tensor]:
        return self.of.rows(count)


class _WrittenForm:
    """The checkpoint in the class of its own modeling file.

    Attributes:
        stored: its tensors.
    """

    def __init__(self, checkpoint: Checkpoint, form: Form, whole: WholeFiles, advance: Advance) -> None:
        """Build the class.

        Raises:
            NotProven: if the checkpoint does not have its tensors.
        """
        config = read_config(checkpoint)
        with _quiet():
            self.model = build_empty(*form.written_class(checkpoint, config))
        self.checkpoint, self.advance = checkpoint, advance
        self.stored = {name: StoredWhenWhole(Stored(checkpoint, name), whole) for name in checkpoint.names()}
        names = match_names(self.model, checkpoint, family_of(config))
        for what, which in (("missing", names.missing), ("unexpected", names.unexpected)):
            if which:
                raise NotProven(f"the {form} form has {what} tensors: {', '.join(sorted(which)[:3])}")
        for name, of in names.by_parameter.items():
            if checkpoint.shape(of) != tuple(self.model.get_parameter(name).shape):
                raise NotProven(f"the {form} form has a tensor of a wrong shape: {of}, {checkpoint.shape(of)}")
        self.by_parameter = names.by_parameter

    def maps_only(self, stored: Collection[str]) -> bool:
        """Whether some stored tensors, as far as the model has any use for them, belong to linear maps."""
        used = (name.rpartition(".")[0] for name, of in self.by_parameter.items() if of in stored)
        return all(isinstance(self.model.get_submodule(module), nn.Linear) for module in used)

    def logits(self, tokens: Tensor, others: Mapping[str, on_demand.Readable] | None = None, runs: int = 1) -> Tensor:
        """Logits, (batch, tokens, vocabulary), with other tensors in the place of some stored ones.

        Args:
            runs: that this one stands for, which is what it advances by.
        """
        weights = self.stored | dict(others or {})
        of_parameters = {name: weights[of] for name, of in self.by_parameter.items()}
        in_files = {name: Stored(self.checkpoint, of) for name, of in self.by_parameter.items()}
        return _logits(
            self.model, tokens, of_parameters, _told(self.checkpoint, in_files, lambda size: self.advance(runs * size))
        )


def _told(checkpoint: Checkpoint, stored: Mapping[str, Stored], advance: Advance) -> Any:
    """Tells `advance` of the bytes of every stored tensor when a parameter is read from it for the first time."""
    left = {tensor.name for tensor in stored.values()}

    def used(parameter: str) -> None:
        name = stored[parameter].name
        if name in left:
            left.remove(name)
            advance(torch.Size(checkpoint.shape(name)).numel() * checkpoint.dtype(name).itemsize)

    return used


@_quiet()
@torch.inference_mode()
def _logits(model: PreTrainedModel, tokens: Tensor, stored: Mapping[str, on_demand.Readable], used: Any) -> Tensor:
    try:
        with WeightsOnDemand(model, stored, used):
            logits: Tensor = model(input_ids=tokens, use_cache=False, return_dict=True).logits
    except (ValueError, OSError, MemoryError, Stopped):
        raise
    except Exception as error:  # config.json may ask for what no class can do
        raise ValueError(
            f"the model that config.json describes cannot be run ({type(error).__name__}: {error})"
        ) from error
    return logits
