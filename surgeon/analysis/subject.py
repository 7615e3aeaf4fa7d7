"""What an analysis works on: a model, and the text it is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from surgeon.checkpoint.load import load, read_config
from surgeon.checkpoint.read import DEMO, Checkpoint, locate
from surgeon.provenance import provenance
from surgeon.quality.data import DEFAULT_TOKENS, Windows, load_windows, window_for
from surgeon.runtime.text import open_tokenizer


@dataclass(frozen=True)
class Subject:
    """A loaded model and its windows of text.

    Attributes:
        name: the model as the user named it.
        folder: where it lies.
        weights_hash: which weights it has.
    """

    name: str
    folder: Path
    model: PreTrainedModel
    windows: Windows
    weights_hash: str

    @property
    def label(self) -> str:
        """A short name for titles."""
        return self.name if self.name == DEMO else self.folder.resolve().name

    @property
    def reference(self) -> str:
        """How a recipe names the model, wherever it is used from: a folder by its whole path, else as the user did."""
        return str(self.folder.resolve()) if Path(self.name).is_dir() else self.name

    def provenance(self, **more: Any) -> dict[str, Any]:
        """The record that goes beside every table made of this subject."""
        text = self.windows
        return provenance(
            self.name,
            self.weights_hash,
            data=text.source,
            data_hash=text.digest,
            separator=text.separator,
            window=text.ids.shape[1],
            tokens=text.ids.numel(),
            tokens_predicted=text.predicted,
            **more,
        )


def open_subject(
    model: str,
    data: str,
    tokens: int = DEFAULT_TOKENS,
    window: int | None = None,
    separator: str | None = None,
) -> Subject:
    """Load a model and the text to measure it on; arguments as `load` and `load_windows` take them.

    Raises:
        FileNotFoundError: if the model, a file of it, or the data is missing.
        ValueError: if one of them cannot be used, saying why.
    """
    folder = locate(model)
    checkpoint = Checkpoint(folder)
    # The text comes first: what is wrong with it is said before a large model is loaded.
    size = window_for(read_config(checkpoint), window)
    windows = load_windows(open_tokenizer(folder), data, size, tokens, separator)
    return Subject(model, folder, load(folder), windows, checkpoint.weights_hash())
