"""What a model predicts on a text, known window by window, and kept in a file: the original is run once.

A file holds the head's rows averaged by the original's probabilities (`ReferencePredictions.kept`), a vector of the
stream's size for each token, and not logits, nor the largest of them: with it the divergence over the full vocabulary
is exact, in a fraction of the room. Of the largest it holds which token has it. Where sampled acceptance is asked for,
which takes all probabilities, it holds the original's normed stream as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from surgeon.models.weights import Tensors
from surgeon.quality.head import ReferencePredictions, quality_of_original
from surgeon.quality.identified import UNREADABLE, open_identified, write_identified

REFERENCE_FILE = "reference.safetensors"
_NAMES = ("kept", "constant", "likeliest", "nll")
_NORMED = "normed"
_WORDS = {
    "model_hash": "another model",
    "data": "another text",
    "dtype": "another dtype to compute in",
}


class TextReferences:
    """An original's predictions on some text, by ranges of windows: any of which all windows are known.

    Args:
        ids: (windows, tokens) of the text.
        device: where predictions that come from a file are put.
        sampled: whether they are for sampled acceptance, too.
    """

    def __init__(self, ids: Tensor, device: torch.device | str = "cpu", sampled: bool = False) -> None:
        self.ids = ids
        self.device = device
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

    @property
    def whole(self) -> bool:
        """Whether every window is known."""
        return all(self.known)

    def save(self, path: Path, identity: Mapping[str, str]) -> bool:
        """Keep them in a file, which is whole or not there; without room for it, a warning says so.

        Args:
            identity: what they depend on: model_hash, data, dtype.

        Returns:
            whether they are in the file now.
        """
        assert self.whole, "some windows are not known yet"
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_identified(path, tensors, identity)
        except UNREADABLE as error:
            size = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
            warnings.warn(
                f"the original's predictions ({size:.0f}MB) could not be kept in {path} ({error}); going on without: "
                "the next run computes them again",
                stacklevel=2,
            )
            return False
        return True

    def load(self, path: Path, identity: Mapping[str, str]) -> bool:
        """Take them from a file, if it is there; a damaged file is left aside with a warning.

        So is, without one, a file of before the likeliest tokens were kept, or without what sampled acceptance takes.

        Returns:
            whether they were taken.

        Raises:
            ValueError: if the file is another model's or another text's, saying in what it differs.
        """
        otherwise = "the original is run again"
        with open_identified(path, identity, _WORDS, "predictions", otherwise, str(self.device)) as file:
            if file is None or not set(file.keys()) >= set(self.names):
                return False
            tensors = {name: file.get_tensor(name) for name in self.names}
        self.tensors = tensors
        self.known = [True] * len(self.ids)
        return True
