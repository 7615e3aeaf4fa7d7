"""A teacher's largest log-probabilities on every training window, kept in a folder: the teacher is run once.

Files of some windows each, safetensors, whole or not there, so that making them can be killed and goes on. Each says
which teacher's they are, on which text: another's are refused. What is read is read window by window.
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

from surgeon.processes.files import HALF_WRITTEN, make_folder, whole_file
from surgeon.processes.locks import locked
from surgeon.progress import progress
from surgeon.provenance import FORMAT
from surgeon.quality.head import OutputHead
from surgeon.training.head_loss import TopLogits
from surgeon.training.texts import TrainingText, model_inputs

_FILE_BYTES = 16 << 20  # no more is lost in a kill
_MOST_WINDOWS = 128  # in a file
_LOCK = ".lock"
UNREADABLE = (OSError, SafetensorError)
_TENSORS = ("ids", "log_p", "rest")  # in a file, as `TopLogits` has them
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
class TeacherIdentity:
    """What kept logits depend on.

    Attributes:
        model_hash: of the teacher (`Checkpoint.model_hash`).
        dtype: that it computes in.
        data: digest of the training windows (`surgeon.quality.data.digest_of`).
        windows: how many there are.
        window: tokens in each.
        kept: how many tokens of the vocabulary are kept for each.
        temperature: that the logits were divided by.
    """

    model_hash: str
    dtype: str
    data: str
    windows: int
    window: int
    kept: int
    temperature: float

    def __post_init__(self) -> None:
        if self.kept < 1:
            raise ValueError(f"at least 1 of the teacher's logits has to be kept for each token, not {self.kept}")

    @property
    def window_bytes(self) -> int:
        """The room that a window takes: an id (int32) and a log-probability (float32) each, and what is left."""
        return 4 * self.window * (2 * self.kept + 1)

    @property
    def files(self) -> list[range]:
        """The windows of each file."""
        at_once = max(1, min(_MOST_WINDOWS, _FILE_BYTES // self.window_bytes))
        return [range(first, min(first + at_once, self.windows)) for first in range(0, self.windows, at_once)]

    def metadata(self) -> dict[str, str]:
        """As a file says it."""
        return {"format": str(FORMAT), **{name: str(value) for name, value in vars(self).items()}}


class TeacherLogits:
    """A folder of kept logits, all of which are there; made by `keep_logits`."""

    def __init__(self, folder: Path, identity: TeacherIdentity) -> None:
        self.folder = folder
        self.identity = identity
        self.files = identity.files

    def read(self, index: Tensor) -> TopLogits:
        """Those of some windows, one after the other.

        Args:
            index: (windows,), which training windows.

        Raises:
            ValueError: if there is no such window.
            OSError: if a file is gone or damaged.
        """
        rows = []
        for window in map(int, index):
            if not 0 <= window < self.identity.windows:
                raise ValueError(
                    f"{self.folder} has logits of windows 0 to {self.identity.windows - 1}, not of window {window}"
                )
            windows = self.files[window // len(self.files[0])]
            path = _path(self.folder, windows)
            try:
                with safe_open(path, "pt") as file:
                    row = window - windows.start
                    rows.append([file.get_slice(name)[row] for name in _TENSORS])
            except UNREADABLE as error:
                raise OSError(f"{path} cannot be read any more ({error}); start again, and it is made again") from error
        return TopLogits(*(torch.cat(each) for each in zip(*rows, strict=True)))


def keep_logits(teacher: PreTrainedModel, text: TrainingText, folder: Path, identity: TeacherIdentity) -> TeacherLogits:
    """Run the teacher on every training window and keep its largest logits; goes on where it was killed.

    Of several processes that call this at once, one makes them, and the others wait for it.

    Args:
        teacher: unedited; it is left in evaluation mode.
        text: all training windows.
        folder: is made if it is not there.

    Raises:
        ValueError: if the folder holds another teacher's, or those of another text or another number of them, or the
            windows are not those that the identity tells of, or the teacher's logits are not finite.
        OSError: if there is no room for them; what was made by then stays.
    """
    if (len(text), text.window) != (identity.windows, identity.window):
        raise ValueError(
            f"kept logits of {identity.windows} windows of {identity.window} tokens cannot be made from "
            f"{len(text)} x {text.window} tokens; give all training windows"
        )
    make_folder(folder)
    if any(not _is_whole(_path(folder, windows), identity) for windows in identity.files):
        with locked(folder / _LOCK):
            for part in folder.glob(HALF_WRITTEN):  # which a process that was killed has left
                part.unlink()
            missing = [windows for windows in identity.files if not _is_whole(_path(folder, windows), identity)]
            if missing:  # or another process has made them meanwhile
                _make(teacher, text, folder, identity, missing)
    return TeacherLogits(folder, identity)


def _make(
    teacher: PreTrainedModel, text: TrainingText, folder: Path, identity: TeacherIdentity, missing: list[range]
) -> None:
    left = sum(map(len, missing))
    teacher.eval()
    with progress("the teacher's logits", identity.windows, "windows", identity.windows - left) as advance:
        for windows in missing:
            parts = []
            for window in windows:
                parts.append(_top_of(teacher, text, window, identity))
                advance(1)
            tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in _TENSORS}
            shaped = {name: tensor.unflatten(0, (len(windows), -1)) for name, tensor in tensors.items()}
            try:
                with whole_file(_path(folder, windows)) as beside:
                    save_file(shaped, beside, metadata=identity.metadata())
            except UNREADABLE as error:
                size = identity.windows * identity.window_bytes / 2**20
                raise OSError(
                    f"the teacher's logits cannot be written to {folder} ({error}); they take {size:,.0f}MB in all: "
                    f"make room and start again, which goes on from here, or keep fewer than {identity.kept} for each "
                    "token"
                ) from error


@torch.inference_mode()
def _top_of(teacher: PreTrainedModel, text: TrainingText, window: int, identity: TeacherIdentity) -> TopLogits:
    row = model_inputs(text.rows.with_format("torch")[window : window + 1])
    inputs = {name: one.to(teacher.device) for name, one in row.items()}
    stream = teacher.base_model(**inputs, use_cache=False).last_hidden_state[0]
    head = OutputHead(teacher)
    blocks = stream.to(head.weight.device).split(head.rows(len(stream)))
    parts = [TopLogits.of(head.logits(block), identity.kept, identity.temperature) for block in blocks]
    found, log_p, rest = (torch.cat([getattr(part, name) for part in parts]).cpu() for name in _TENSORS)
    if not log_p.isfinite().all():
        raise ValueError(f"the teacher's logits are not finite in training window {window}; are its weights damaged?")
    return TopLogits(found.int(), log_p, rest)


def _is_whole(path: Path, identity: TeacherIdentity) -> bool:
    """Whether a file is there; a damaged one is not.

    Raises:
        ValueError: if it is another teacher's, say.
    """
    if not path.is_file():
        return False
    try:
        with safe_open(path, "pt") as file:
            found = file.metadata() or {}
    except UNREADABLE as error:
        warnings.warn(f"{path} is damaged ({error}); it is made again", stacklevel=2)
        return False
    for name, value in identity.metadata().items():
        if found.get(name) != value:
            raise ValueError(
                f"{path} holds logits of {_NAMES[name]} ({name} {found.get(name)}, not {value}); use another folder, "
                "or remove the file"
            )
    return True


def _path(folder: Path, windows: range) -> Path:
    return folder / f"windows-{windows.start:07}.safetensors"
