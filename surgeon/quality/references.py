"""What a model predicts on a text, known window by window: the original is run once."""

from __future__ import annotations

from torch import Tensor

from surgeon.models.weights import Tensors
from surgeon.quality.head import ReferencePredictions, quality_of_original

_NAMES = ("kept", "constant", "likeliest", "nll")
_NORMED = "normed"


class TextReferences:
    """An original's predictions on some text, by ranges of windows: any of which all windows are known.

    Args:
        ids: (windows, tokens) of the text.
        sampled: whether they are for sampled acceptance, too.
    """

    def __init__(self, ids: Tensor, sampled: bool = False) -> None:
        self.ids = ids
        self.sampled = sampled
        self.names = (*_NAMES, _NORMED) if sampled else _NAMES
        self.known = [False] * len(ids)
        self.tensors: Tensors = {}  # by window, in one piece each, so that neighbouring windows need no copy

    def __getitem__(self, windows: range) -> ReferencePredictions:
        if not all(self.known[windows.start : windows.stop]):
            raise KeyError(windows)
        kept, constant, likeliest, nll, *more = (
            self.tensors[name][windows.start : windows.stop] for name in self.names
        )
        ids = self.ids[windows.start : windows.stop].to(kept.device)
        by_token = kept.flatten(0, 1), constant.flatten(), likeliest.flatten()
        normed = (one.flatten(0, 1) for one in more)
        return ReferencePredictions(ids, *by_token, quality_of_original(nll, self.sampled), *normed)

    def __setitem__(self, windows: range, reference: ReferencePredictions) -> None:
        given = [reference.kept, reference.constant, reference.likeliest, reference.quality["nll"]]
        if self.sampled and reference.normed is not None:
            given += [reference.normed]
        for name, tensor in zip(self.names, given, strict=True):
            shaped = tensor
            if name != "nll":
                shaped = tensor.unflatten(0, (len(windows), -1))
            if name not in self.tensors:
                self.tensors[name] = shaped.new_empty((len(self.ids), *shaped.shape[1:]))
            self.tensors[name][windows.start : windows.stop] = shaped
        self.known[windows.start : windows.stop] = [True] * len(windows)

    def __contains__(self, windows: object) -> bool:
        return isinstance(windows, range) and all(self.known[windows.start : windows.stop])
