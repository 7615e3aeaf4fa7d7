"""Perplexity of a whole model on a text, and divergence from another model, by their full logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from surgeon.models.edit import input_device
from surgeon.models.verified import DraftOnText
from surgeon.progress import progress
from surgeon.quality.data import Windows
from surgeon.quality.head import OutputHead
from surgeon.quality.summary import (
    METRICS,
    UNKNOWN,
    Quality,
    Values,
    known_interval,
    mean_divergence,
    perplexity,
    perplexity_interval,
    pool_windows,
)

# Keys and values that acceptance is judged by.
VERIFIED = "verified"
OWN = "own"
_COMPARED = METRICS[1:]  # of two models
# Token ids, (windows, tokens), to logits, (windows, tokens, vocabulary).
Logits = Callable[[Tensor], Tensor]


def logits_of(model: nn.Module) -> Logits:
    """Make a model's forward pass, without a cache, a function of token ids."""

    def logits(ids: Tensor) -> Tensor:
        if isinstance(model, PreTrainedModel):
            device = input_device(model)
        else:
            device = next(model.parameters()).device
        found: Tensor = model(input_ids=ids.to(device), use_cache=False).logits
        return found

    return logits


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside; afterwards each module is back in its own."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def text_quality(
    model: Logits,
    ids: Tensor,
    original: Logits | None = None,
    bar: bool = True,
    answers: Tensor | None = None,
    draft: DraftOnText | None = None,
) -> Quality:
    """Measure a model on windows of text, one at a time; arguments and errors as `text_values`."""
    found = text_values(model, ids, original, bar, answers, draft)
    if answers is None:
        tokens = ids.shape[0] * (ids.shape[1] - 1)
    else:
        tokens = int(answers[:, 1:].sum())
    quality = Quality(
        perplexity(found["nll"]), *(perplexity_interval(found["nll"]) or UNKNOWN), tokens=tokens
    )
    if "divergence" not in found:
        return quality
    numbers: dict[str, Any] = {"divergence": mean_divergence(found["divergence"])}
    for name in _COMPARED:
        numbers.setdefault(name, float(found[name].mean()))
        most = 1.0
        if name == "divergence":
            most = math.inf
        numbers[f"{name}_low"], numbers[f"{name}_high"] = known_interval(found[name], 0.0, most)
    return replace(quality, **numbers, acceptance_keys=None if draft is None else VERIFIED)


@torch.inference_mode()
def text_values(
    model: Logits,
    ids: Tensor,
    original: Logits | None = None,
    bar: bool = True,
    answers: Tensor | None = None,
    draft: DraftOnText | None = None,
) -> dict[str, Values]:
    """Measure each window: means over its predicted tokens, (windows,), by name as in `Quality`, and `nll` in nats.

    Where windows have different counts, they are weighted (`surgeon.quality.summary.pool_windows`).

    Args:
        ids: (windows, tokens); every token but a window's first is predicted.
        original: the model to compare with, of the same vocabulary.
        bar: show a progress bar.
        answers: (windows, tokens), tokens that count; None for all. Models do not run behind the last.
        draft: the original with the model as its draft, for acceptance; takes the place of `original`.

    Raises:
        ValueError: if the vocabularies differ, or the model's predictions are not finite.
    """
    parts = []
    with progress("text", len(ids), "windows") if bar else nullcontext(lambda _: None) as advance:
        for window, counted in split_windows(ids, answers):
            logits = model(window)[0, :-1][counted].float()
            following = window[0, 1:][counted].to(logits.device)
            row = [float(functional.cross_entropy(logits, following))]
            if draft is not None:
                wanted, drafted = (
                    one[0, :-1][counted].float().to(logits.device) for one in draft(window)
                )
            elif original is not None:
                wanted = original(window)[0, :-1][counted].float().to(logits.device)
                drafted = logits
            if draft is not None or original is not None:
                if wanted.shape != logits.shape:
                    raise ValueError(
                        f"the models have vocabularies of {wanted.shape[-1]:,} and {logits.shape[-1]:,} tokens; "
                        "divergence is told between models of one vocabulary"
                    )
                log_p = wanted.log_softmax(-1).double()
                log_q = logits.log_softmax(-1).double()
                q = log_q.exp() if drafted is logits else drafted.softmax(-1).double()
                p = log_p.exp()
                by_token = (
                    (p * (log_p - log_q)).sum(-1),
                    (wanted.argmax(-1) == drafted.argmax(-1)).double(),
                    torch.minimum(p, q).sum(-1).clamp(max=1),  # rounding can make it more
                )
                row += [float(values.mean()) for values in by_token]
            parts.append(row)
            advance(1)
    columns = list(np.array(parts).T)
    if not np.isfinite(columns[0]).all():
        where = int(np.flatnonzero(~np.isfinite(columns[0]))[0])
        raise ValueError(
            f"the model's predictions are not finite in window {where}; are its weights damaged?"
        )
    if answers is not None:
        counts = answers[:, 1:].sum(1).double().numpy()
        columns = [pool_windows(column, counts) for column in columns]
    return dict(zip(("nll", *_COMPARED), columns, strict=False))


def split_windows(ids: Tensor, answers: Tensor | None) -> Iterator[tuple[Tensor, Tensor | slice]]:
    """Yield windows, (1, tokens), up to the last answer, and the places, (tokens - 1,), whose next token counts."""
    for window, marks in zip(
        ids.split(1), [None] * len(ids) if answers is None else answers, strict=True
    ):
        if marks is None:
            yield window, slice(None)
        else:
            last = int(marks.nonzero().max())
            yield window[:, : last + 1], marks[1 : last + 1].bool()


class HeldOutQuality:
    """Windows of text with the original's predictions, kept as its normed stream and output head.

    The original itself need not stay in memory: its logits are the head on the stream.

    Attributes:
        original: the original's own quality; None without one.
    """

    def __init__(self, windows: Windows, original: PreTrainedModel | None) -> None:
        self.ids = windows.ids
        self.answers = windows.answers
        self.original: Quality | None = None
        self._reference: Logits | None = None
        if original is None:
            return
        streams: dict[bytes, Tensor] = {}
        with torch.inference_mode():
            head = OutputHead(original)
            for window, _ in split_windows(self.ids, self.answers):
                output = original.base_model(input_ids=window.to(original.device), use_cache=False)
                streams[window.numpy().tobytes()] = output.last_hidden_state.cpu()

        def logits(window: Tensor) -> Tensor:
            stream = streams[window.numpy().tobytes()].to(head.weight.device)
            return head.logits(stream[0])[None]

        self._reference = logits
        self.original = text_quality(logits, self.ids, bar=False, answers=self.answers)

    def measure(self, model: nn.Module, step: int = 0) -> Quality:  # noqa: ARG002 - parts of models need it
        return self.quality(model, logits_of(model))

    def quality(self, model: nn.Module, logits: Logits) -> Quality:
        """Measure by a function of windows that calls the model, in the order of the windows."""
        with in_evaluation_mode(model):
            return text_quality(logits, self.ids, self._reference, bar=False, answers=self.answers)

    def values(self, model: nn.Module) -> dict[str, Values]:
        with in_evaluation_mode(model):
            return text_values(
                logits_of(model), self.ids, self._reference, bar=False, answers=self.answers
            )
