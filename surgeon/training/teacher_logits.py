"""A teacher's largest log-probabilities on every training window, kept in a folder: the teacher is run once.

Each safetensors file has some windows and is whole or not there, so that making them resumes after a kill. Its metadata
name teacher and text: files of others are refused.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.processes.files import HALF_WRITTEN, lock_file, make_folder, whole_file
from surgeon.progress import progress
from surgeon.provenance import FORMAT
from surgeon.quality.head import OutputHead
from surgeon.training.head_loss import TopLogits
from surgeon.training.texts import TrainingText, model_inputs

_FILE_BYTES = 16 << 20  # no more is lost in a kill
_MOST_WINDOWS = 128  # in a file
_LOCK = ".lock"
UNREADABLE = (OSError, SafetensorError)
_NAMES = {
    "format": "an older or a newer version's format",
    "model_hash": "another teacher",
    "dtype": "a teacher in another dtype",
    "data": "another text",
    "windows": "windows of another number",
    "window": "windows of another size",
    "kept": "another number of tokens",
    "temperature": "another temperature",
}


@dataclass(frozen=True)
class TeacherLogits:
    """A folder of kept logits, and what they depend on; `make` fills it.

    Attributes:
        model_hash: of the teacher (`Checkpoint.model_hash`).
        dtype: that the teacher computes in.
        data: digest of the training windows (`surgeon.quality.data.digest_of`).
        windows, window: number of windows, and of tokens in each.
        kept: tokens of the vocabulary that are kept for each token.
        temperature: divides the logits.
    """

    folder: Path
    model_hash: str
    dtype: str
    data: str
    windows: int
    window: int
    kept: int
    temperature: float

    def __post_init__(self) -> None:
        if self.kept < 1:
            raise ValueError(
                f"at least 1 of the teacher's logits has to be kept for each token, not {self.kept}"
            )

    @property
    def window_bytes(self) -> int:
        """Bytes of a window: an id (int32) and a log-probability (float32) each, and the rest's."""
        return 4 * self.window * (2 * self.kept + 1)

    @property
    def files(self) -> list[range]:
        at_once = max(1, min(_MOST_WINDOWS, _FILE_BYTES // self.window_bytes))
        return [
            range(first, min(first + at_once, self.windows)) for first in range(0, self.windows, at_once)
        ]

    @property
    def metadata(self) -> dict[str, str]:
        follows = {name: str(value) for name, value in vars(self).items() if name != "folder"}
        return {"format": str(FORMAT), **follows}

    def read(self, index: Tensor) -> TopLogits:
        """Read the logits of some windows, one after the other.

        Args:
            index: (windows,), numbers of training windows.

        Raises:
            ValueError: if there is no such window.
            OSError: if a file is gone or damaged.
        """
        files = self.files
        rows = []
        for window in map(int, index):
            if not 0 <= window < self.windows:
                raise ValueError(
                    f"{self.folder} has logits of windows 0 to {self.windows - 1}, not of window {window}"
                )
            windows = files[window // len(files[0])]
            path = self._path(windows)
            try:
                with safe_open(path, "pt") as file:
                    row = window - windows.start
                    rows.append(TopLogits(*(file.get_slice(name)[row] for name in TopLogits._fields)))
            except UNREADABLE as error:
                raise OSError(
                    f"{path} cannot be read any more ({error}); start again, and it is made again"
                ) from error
        return TopLogits.join(rows)

    def make(self, teacher: PreTrainedModel, text: TrainingText) -> None:
        """Run the teacher on every training window that is missing; of several processes one does, the others wait.

        Args:
            teacher: unedited; it is left in evaluation mode.
            text: all training windows.

        Raises:
            ValueError: if the folder holds logits of something else, the text has other windows than are described, or
                the teacher's logits are not finite.
            OSError: if the disk is full; files that are whole stay.
        """
        if (len(text), text.window) != (self.windows, self.window):
            raise ValueError(
                f"kept logits of {self.windows} windows of {self.window} tokens cannot be made from "
                f"{len(text)} x {text.window} tokens; give all training windows"
            )
        make_folder(self.folder)
        if any(not self._is_whole(windows) for windows in self.files):
            with lock_file(self.folder / _LOCK):
                for part in self.folder.glob(HALF_WRITTEN):  # of a process that was killed
                    part.unlink()
                missing = [windows for windows in self.files if not self._is_whole(windows)]
                if missing:  # or another process has made them meanwhile
                    self._write(teacher, text, missing)

    def _write(self, teacher: PreTrainedModel, text: TrainingText, missing: list[range]) -> None:
        left = sum(map(len, missing))
        teacher.eval()
        with progress("the teacher's logits", self.windows, "windows", self.windows - left) as advance:
            for windows in missing:
                parts = []
                for window in windows:
                    parts.append(self._top_of(teacher, text, window))
                    advance(1)
                shaped = {
                    name: tensor.unflatten(0, (len(windows), -1))
                    for name, tensor in TopLogits.join(parts)._asdict().items()
                }
                try:
                    with whole_file(self._path(windows)) as beside:
                        save_file(shaped, beside, metadata=self.metadata)
                except UNREADABLE as error:
                    size = self.windows * self.window_bytes / 2**20
                    raise OSError(
                        f"the teacher's logits cannot be written to {self.folder} ({error}); they take {size:,.0f}MB "
                        "in all: make room and start again, which goes on from here, or keep fewer than "
                        f"{self.kept} for each token"
                    ) from error

    @torch.inference_mode()
    def _top_of(self, teacher: PreTrainedModel, text: TrainingText, window: int) -> TopLogits:
        row = model_inputs(text.rows.with_format("torch")[window : window + 1])
        inputs = {name: one.to(teacher.device) for name, one in row.items()}
        stream = teacher.base_model(**inputs, use_cache=False).last_hidden_state[0]
        head = OutputHead(teacher)
        blocks = stream.to(head.weight.device).split(head.rows(len(stream)))
        parts = [TopLogits.of(head.logits(block), self.kept, self.temperature) for block in blocks]
        top = TopLogits(*(each.cpu() for each in TopLogits.join(parts)))
        if not top.log_p.isfinite().all():
            raise ValueError(
                f"the teacher's logits are not finite in training window {window}; are its weights damaged?"
            )
        return top._replace(ids=top.ids.int())

    def _is_whole(self, windows: range) -> bool:
        """Tell whether a file can be read; ValueError if it holds logits of something else."""
        path = self._path(windows)
        if not path.is_file():
            return False
        try:
            with safe_open(path, "pt") as file:
                stored = file.metadata() or {}
        except UNREADABLE as error:
            warnings.warn(f"{path} is damaged ({error}); it is made again", stacklevel=2)
            return False
        for name, value in self.metadata.items():
            if stored.get(name) != value:
                raise ValueError(
                    f"{path} holds logits of {_NAMES[name]} ({name} {stored.get(name)}, not {value}); use another "
                    "folder, or remove the file"
                )
        return True

    def _path(self, windows: range) -> Path:
        return self.folder / f"windows-{windows.start:07}.safetensors"
