"""How well a whole model predicts a text: perplexity, and divergence from another model, by their full logits."""

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
from surgeon.progress import progress
from surgeon.quality.head import Quality
from surgeon.quality.summary import Values, known_interval, mean_divergence, perplexity, perplexity_interval

Logits = Callable[[Tensor], Tensor]  # token ids, (windows, tokens), to logits, (windows, tokens, vocabulary)


@dataclass(frozen=True)
class TextQuality:
    """Numbers of one model on a text, each with its 95% interval over windows; None where that cannot be told.

    Attributes:
        divergence: KL(original || model) in nats per token; None where there is nothing to compare with.
        tokens: how many were predicted.
    """

    perplexity: float
    perplexity_interval: tuple[float, float] | None
    divergence: float | None
    divergence_interval: tuple[float, float] | None
    tokens: int

    def table(self) -> pd.DataFrame:
        """A row for each number that there is, with the ends of its interval."""
        rows = []
        for metric in ("perplexity", "divergence"):
            if (value := getattr(self, metric)) is not None:
                low, high = getattr(self, f"{metric}_interval") or (None, None)
                rows.append({"metric": metric, "value": value, "low": low, "high": high})
        return pd.DataFrame(rows)

    def line(self) -> str:
        """For people, in one line."""
        text = f"perplexity {self.perplexity:.4g}{_in_brackets(self.perplexity_interval, 4)}"
        if self.divergence is not None:
            text += f", divergence {self.divergence:.3g}{_in_brackets(self.divergence_interval, 3)}"
        return f"{text} over {self.tokens:,} tokens"

    def to_json(self) -> dict[str, object]:
        """As JSON values."""
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


def text_quality(model: Logits, ids: Tensor, original: Logits | None = None, bar: bool = True) -> TextQuality:
    """Measure a model on windows of text, one window at a time; arguments and errors as `text_values`."""
    nll, divergence = text_values(model, ids, original, bar)
    tokens = ids.shape[0] * (ids.shape[1] - 1)
    found = perplexity(nll), perplexity_interval(nll)
    if divergence is None:
        return TextQuality(*found, None, None, tokens)
    return TextQuality(*found, mean_divergence(divergence), known_interval(divergence), tokens)


@torch.inference_mode()
def text_values(
    model: Logits, ids: Tensor, original: Logits | None = None, bar: bool = True
) -> tuple[Values, Values | None]:
    """The negative log-likelihood of each window, and the divergence, (windows,) each, means over its tokens in nats.

    Args:
        ids: (windows, tokens); every token but a window's first is predicted.
        original: what the divergence is from, a model with the same vocabulary.
        bar: whether a progress bar says how far it is.

    Raises:
        ValueError: if the vocabularies differ, or the model's predictions are not finite.
    """
    parts = []
    with progress("text", len(ids), "windows") if bar else nullcontext(lambda _: None) as advance:
        for window in ids.split(1):
            parts.append(_window(model, window, original))
            advance(1)
    nll = np.array([float(part.nll) for part in parts])
    if not np.isfinite(nll).all():
        where = int(np.flatnonzero(~np.isfinite(nll))[0])
        raise ValueError(f"the model's predictions are not finite in window {where}; are its weights damaged?")
    return nll, None if original is None else np.array([float(part.divergence) for part in parts])


def _window(model: Logits, window: Tensor, original: Logits | None) -> Quality:
    logits = model(window)[0, :-1].float()
    nll = functional.cross_entropy(logits, window[0, 1:].to(logits.device))
    if original is None:
        return Quality(nll, torch.full_like(nll, torch.nan))
    wanted = original(window)[0, :-1].float().to(logits.device)
    if wanted.shape != logits.shape:
        raise ValueError(
            f"the models have vocabularies of {wanted.shape[-1]:,} and {logits.shape[-1]:,} tokens; divergence is "
            "told between models of one vocabulary"
        )
    log_p, log_q = wanted.log_softmax(-1).double(), logits.log_softmax(-1).double()
    return Quality(nll, (log_p.exp() * (log_p - log_q)).sum(-1).mean())
