"""The proof that a checkpoint computes what the program does, on random tokens, in float32.

Two differences are measured, each the largest one between two logits, relative to the largest logit:

    exact    between the edited original and the written form with its weights before they are rounded to 16 bits;
             nothing but float32's own rounding is left, so it must stay below 1e-4
    written  between the edited original and the files as they were written; where weights had to be computed (folded,
             averaged) and are stored in 16 bits, their rounding shows here, and the bound is wider. Those files are
             also compared bit for bit with the weights of the first difference, rounded
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel
from transformers.utils import logging

from surgeon.checkpoint.forms import Layout
from surgeon.checkpoint.fuse import PlannedTensor
from surgeon.checkpoint.load import load
from surgeon.checkpoint.read import Checkpoint
from surgeon.checkpoint.remote_code import SHIPPED
from surgeon.checkpoint.write import as_bytes
from surgeon.model import edit
from surgeon.program import Program

EXACT_TOLERANCE = 1e-4
# Rounding changes each computed weight by up to 2^-9 (bfloat16) or 2^-12 (float16) of itself.
WRITTEN_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
BATCH, LENGTH = 2, 64


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


class NotProven(ValueError):
    """The written form does not compute what the program does."""


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


def reference_of(source: Path, program: Program) -> Reference:
    """Run the original with the program, in float32.

    Raises:
        ValueError: if the original cannot be loaded, or its logits are not finite.
    """
    reference = _run_original(source, program)
    gc.collect()  # an edited model refers to itself, and would stay in memory
    if not reference.logits.isfinite().all():
        raise ValueError(
            f"the edited model has logits that are not finite on random tokens; are the weights of {source} damaged?"
        )
    return reference


@_quiet()
def _run_original(source: Path, program: Program) -> Reference:
    model = edit(load(source, dtype=torch.float32), program)
    tokens = torch.randint(model.config.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens = tokens[:, : getattr(model.config, "max_position_embeddings", LENGTH)]
    return Reference(tokens, _logits(model, tokens))


def prove(reference: Reference, folder: Path, layout: Layout, tensors: list[PlannedTensor]) -> Proof:
    """Compare what was written in the folder with the reference.

    Raises:
        NotProven: if the logits differ by more than rounding can explain.
    """
    rounded = {tensor.dtype for tensor in tensors if tensor.rounded}
    tolerance = max((WRITTEN_TOLERANCE[dtype] for dtype in rounded), default=EXACT_TOLERANCE)
    written = reference.difference(_run_written(folder, layout, reference.tokens))
    exact = written
    if rounded:
        weights = _before_rounding(folder, tensors)
        gc.collect()
        exact = reference.difference(_run_written(folder, layout, reference.tokens, weights))
    for name, found, bound in (("before rounding", exact, EXACT_TOLERANCE), ("as written", written, tolerance)):
        if not found <= bound:  # so that nan is refused too
            raise NotProven(
                f"the {layout.form} form does not compute what the program does: its logits {name} differ by "
                f"{found:.2g} of their scale (at most {bound:g} is allowed), so nothing was written"
            )
    dtype = str(next(iter(rounded), torch.float32)).removeprefix("torch.")
    return Proof(reference.tokens.numel(), reference.scale, exact, written, tolerance, dtype)


def _before_rounding(folder: Path, tensors: list[PlannedTensor]) -> dict[str, Tensor]:
    """All weights in float32, each checked to be, when rounded, what the folder's files hold, bit for bit."""
    written = Checkpoint(folder)
    weights = {}
    for planned in tensors:
        value = planned.build()
        if not torch.equal(as_bytes(value.to(planned.dtype)), as_bytes(written.tensor(planned.name))):
            raise NotProven(f"{planned.name} was written with other values than it should have, so nothing was kept")
        weights[planned.name] = value.float()
    return weights


@_quiet()
def _run_written(folder: Path, layout: Layout, tokens: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
    """Logits of the checkpoint in the class of its own modeling file, with its own or with given weights."""
    config = AutoConfig.from_pretrained(folder)
    shipped = SHIPPED.get(layout.form)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if shipped is not None:
        model_class = shipped.model_class(config.model_type, folder)
    given = {"pretrained_model_name_or_path": folder if weights is None else None, "state_dict": weights}
    model, report = model_class.from_pretrained(**given, config=config, dtype=torch.float32, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys"):
        if report[what]:
            some = ", ".join(sorted(report[what])[:3])
            raise NotProven(f"the {layout.form} form has {what.replace('_keys', '')} tensors: {some}")
    return _logits(model.eval(), tokens)


@torch.no_grad()
def _logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits
