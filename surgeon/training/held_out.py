"""Quality on held-out text while a model is trained: perplexity, and divergence from the original."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.models.families import family_of
from surgeon.quality.data import Windows
from surgeon.quality.head import OutputHead
from surgeon.quality.summary import Quality, Values
from surgeon.quality.text import (
    Logits,
    evaluated,
    logits_of,
    split_windows,
    text_quality,
    text_values,
)


class Measure(Protocol):
    """What judges a model while it is trained."""

    @property
    def original(self) -> Quality | None:
        """The original's own quality; None without one."""

    def measure(self, model: nn.Module, step: int) -> Quality:
        """The quality of a model as it is after so many steps, without dropout."""


class HeldOutQuality:
    """Windows of text with what the original predicts on them, kept as its normed stream and its output head.

    The original itself need not stay in memory: its logits are the head on the stream.

    Attributes:
        original: the original's own quality; None without one.
    """

    def __init__(self, windows: Windows, original: PreTrainedModel | None) -> None:
        self.ids = windows.ids
        self.answers = windows.answers
        self._streams: dict[bytes, Tensor] = {}
        self._head: OutputHead | None = None
        self.original: Quality | None = None
        if original is None:
            return
        found = list[Tensor]()
        norm = original.get_submodule(family_of(original.config).final_norm)
        hook = norm.register_forward_hook(lambda _module, _inputs, output: found.append(output))
        try:
            with torch.inference_mode():
                self._head = OutputHead(original)
                for window, _ in split_windows(self.ids, self.answers):
                    original.base_model(input_ids=window.to(original.device), use_cache=False)
                    self._streams[window.numpy().tobytes()] = found.pop().cpu()
        finally:
            hook.remove()
        self.original = text_quality(self._logits, self.ids, bar=False, answers=self.answers)

    def measure(self, model: nn.Module, step: int = 0) -> Quality:  # noqa: ARG002 - parts of models need it
        """The quality of a model as it is, without dropout."""
        return self.quality(model, logits_of(model))

    def quality(self, model: nn.Module, logits: Logits) -> Quality:
        """The same by logits that the model takes part in, asked for window by window in their order."""
        with evaluated(model):
            return text_quality(logits, self.ids, self._reference, bar=False, answers=self.answers)

    def values(self, model: nn.Module) -> dict[str, Values]:
        """The same window by window, as `text_values` gives it."""
        with evaluated(model):
            return text_values(logits_of(model), self.ids, self._reference, bar=False, answers=self.answers)

    @property
    def _reference(self) -> Logits | None:
        if self._head is None:
            return None
        return self._logits

    def _logits(self, window: Tensor) -> Tensor:
        """The original's, (1, tokens, vocabulary), on one of the windows, (1, tokens)."""
        assert self._head is not None
        stream = self._streams[window.numpy().tobytes()].to(self._head.weight.device)
        return self._head.logits(stream[0])[None]
