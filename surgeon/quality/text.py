"""How well a whole model predicts a text, and how near another model's its predictions are, by their full logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from surgeon.models.edit import input_device
from surgeon.models.verified import DraftOnText
from surgeon.progress import progress
from surgeon.quality.summary import (
    Values,
    known_interval,
    mean_divergence,
    perplexity,
    perplexity_interval,
    pooled,
)

VERIFIED, OWN = "verified", "own"  # keys and values that acceptance is judged by
COMPARED = ("divergence", "greedy_acceptance", "sampled_acceptance")  # what is told of two models
Logits = Callable[[Tensor], Tensor]  # token ids, (windows, tokens), to logits, (windows, tokens, vocabulary)


@dataclass(frozen=True)
class TextQuality:
    """Numbers of one model on a text, each with its 95% interval over windows; None where that cannot be told.

    Attributes:
        divergence: KL(original || model) in nats per token; None where there is nothing to compare with.
        tokens: how many were predicted.
        greedy_acceptance: the share of tokens at which both models find the same one likeliest: how often a token that
            the model drafts is the original's own; None as for divergence, and of what was stored without it.
        sampled_acceptance: the mean over tokens of sum_v min(p_v, q_v), the chance that a token which is drawn from
            the model is accepted as one of the original's (Leviathan et al. 2023, corollary 3.6); None likewise.
        acceptance_keys: whose keys and values of earlier tokens the model reads for its acceptance: "verified", the
            original's, as drafts do, or its "own"; None where that is not said.
    """

    perplexity: float
    perplexity_interval: tuple[float, float] | None
    divergence: float | None
    divergence_interval: tuple[float, float] | None
    tokens: int
    greedy_acceptance: float | None = None
    greedy_acceptance_interval: tuple[float, float] | None = None
    sampled_acceptance: float | None = None
    sampled_acceptance_interval: tuple[float, float] | None = None
    acceptance_keys: str | None = None

    def table(self) -> pd.DataFrame:
        """A row for each number that there is, with the ends of its interval."""
        rows = []
        for metric in ("perplexity", *COMPARED):
            if (value := getattr(self, metric)) is not None:
                low, high = getattr(self, f"{metric}_interval") or (None, None)
                rows.append({"metric": metric, "value": value, "low": low, "high": high})
        return pd.DataFrame(rows)

    def line(self) -> str:
        text = f"perplexity {self.perplexity:.4g}{_in_brackets(self.perplexity_interval, 4)}"
        if self.divergence is not None:
            text += f", divergence {self.divergence:.3g}{_in_brackets(self.divergence_interval, 3)}"
        return f"{text} over {self.tokens:,} tokens"

    def as_draft(self) -> str:
        """For people, in one line: how well the model would draft for the original; nothing where that is not known."""
        if self.greedy_acceptance is None or self.sampled_acceptance is None:
            return ""
        greedy = f"{self.greedy_acceptance:.3f}{_in_brackets(self.greedy_acceptance_interval, 3)}"
        sampled = f"{self.sampled_acceptance:.3f}{_in_brackets(self.sampled_acceptance_interval, 3)}"
        by = "" if self.acceptance_keys is None else f", by {self.acceptance_keys} keys and values"
        return f"as a draft: acceptance {greedy} greedy, {sampled} sampled{by}"

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> TextQuality:
        """The inverse of `to_json`, of what was read from a file."""
        values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in entries.items()}
        return cls(**values)


def _in_brackets(ends: tuple[float, float] | None, digits: int) -> str:
    return "" if ends is None else f" ({ends[0]:.{digits}g} to {ends[1]:.{digits}g})"


def logits_of(model: nn.Module) -> Logits:
    """A model's own forward pass, without a cache, whatever is wrapped around it."""

    def logits(ids: Tensor) -> Tensor:
        device = input_device(model) if isinstance(model, PreTrainedModel) else next(model.parameters()).device
        found: Tensor = model(input_ids=ids.to(device), use_cache=False).logits
        return found

    return logits


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode; each of its modules is in its own again afterwards."""
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
) -> TextQuality:
    """Measure a model on windows of text, one window at a time; arguments and errors as `text_values`."""
    found = text_values(model, ids, original, bar, answers, draft)
    tokens = ids.shape[0] * (ids.shape[1] - 1) if answers is None else int(answers[:, 1:].sum())
    own = perplexity(found.nll), perplexity_interval(found.nll)
    if found.divergence is None or found.greedy_acceptance is None or found.sampled_acceptance is None:
        return TextQuality(*own, None, None, tokens)
    return TextQuality(
        *own,
        mean_divergence(found.divergence),
        known_interval(found.divergence, 0.0),
        tokens,
        float(found.greedy_acceptance.mean()),
        known_interval(found.greedy_acceptance, 0.0, 1.0),
        float(found.sampled_acceptance.mean()),
        known_interval(found.sampled_acceptance, 0.0, 1.0),
        None if draft is None else VERIFIED,
    )


@dataclass(frozen=True)
class TextValues:
    """Per window: means over its predicted tokens, (windows,); what they are is said in `TextQuality`.

    Where windows do not have as many, they are as `surgeon.quality.summary.pooled` makes them.

    Attributes:
        nll: negative log-likelihood, nats.
    """

    nll: Values
    divergence: Values | None = None
    greedy_acceptance: Values | None = None
    sampled_acceptance: Values | None = None


@torch.inference_mode()
def text_values(
    model: Logits,
    ids: Tensor,
    original: Logits | None = None,
    bar: bool = True,
    answers: Tensor | None = None,
    draft: DraftOnText | None = None,
) -> TextValues:
    """Measure each window.

    Args:
        ids: (windows, tokens); every token but a window's first is predicted.
        original: what it is compared with, a model with the same vocabulary.
        bar: whether a progress bar says how far it is.
        answers: (windows, tokens), which tokens count; None for all. Models are not asked for what is behind the last.
        draft: the original, which need not be given then, and the model as its draft, which acceptance is of.

    Raises:
        ValueError: if the vocabularies differ, or the model's predictions are not finite.
    """
    parts = []
    with progress("text", len(ids), "windows") if bar else nullcontext(lambda _: None) as advance:
        for window, counted in split_windows(ids, answers):
            parts.append(_window(model, window, original, counted, draft))
            advance(1)
    columns = list(np.array(parts).T)
    if not np.isfinite(columns[0]).all():
        where = int(np.flatnonzero(~np.isfinite(columns[0]))[0])
        raise ValueError(f"the model's predictions are not finite in window {where}; are its weights damaged?")
    if answers is not None:
        counts = answers[:, 1:].sum(1).double().numpy()
        columns = [pooled(column, counts) for column in columns]
    return TextValues(*columns)


def split_windows(ids: Tensor, answers: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor | slice]]:
    """Each window, (1, tokens), up to its last answer, and the places, (tokens - 1,), whose next token counts."""
    for window, marks in zip(ids.split(1), [None] * len(ids) if answers is None else answers, strict=True):
        if marks is None:
            yield window, slice(None)
        else:
            last = int(marks.nonzero().max())
            yield window[:, : last + 1], marks[1 : last + 1].bool()


def _window(
    model: Logits, window: Tensor, original: Logits | None, counted: Tensor | slice, draft: DraftOnText | None
) -> tuple[float, ...]:
    """The means over those of a window's tokens that count, in the order of `TextValues`."""
    logits = model(window)[0, :-1][counted].float()
    nll = float(functional.cross_entropy(logits, window[0, 1:][counted].to(logits.device)))
    if draft is not None:
        wanted, drafted = (one[0, :-1][counted].float().to(logits.device) for one in draft(window))
    elif original is not None:
        wanted, drafted = original(window)[0, :-1][counted].float().to(logits.device), logits
    else:
        return (nll,)
    if wanted.shape != logits.shape:
        raise ValueError(
            f"the models have vocabularies of {wanted.shape[-1]:,} and {logits.shape[-1]:,} tokens; divergence is "
            "told between models of one vocabulary"
        )
    log_p, log_q = wanted.log_softmax(-1).double(), logits.log_softmax(-1).double()
    q = log_q.exp() if drafted is logits else drafted.softmax(-1).double()
    p = log_p.exp()
    by_token = (
        (p * (log_p - log_q)).sum(-1),
        (wanted.argmax(-1) == drafted.argmax(-1)).double(),
        torch.minimum(p, q).sum(-1).clamp(max=1),  # rounding can make it more
    )
    return nll, *(float(values.mean()) for values in by_token)
