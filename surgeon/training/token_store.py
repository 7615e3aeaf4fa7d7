"""Windows of tokens on the disk: a text is tokenized once, as far as runs need it, and mapped into memory from then on.

FOLDER/rows-N.arrow   windows, as `surgeon.training.packing` makes them; whole or not there
FOLDER/state.json     how many windows each file has, and where the text goes on behind the last one
FOLDER/known.json     what was computed of all of them: digests

A folder's name follows from the text, the tokenizer and how it is packed. Whoever needs more windows than there are
goes on with it, also after it was killed, or the text could not be read; others wait meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets.arrow_writer import ArrowWriter
from numpy.typing import NDArray
from torch import Tensor

from surgeon.checkpoint.read import read_json
from surgeon.processes.files import HALF_WRITTEN, make_folder, whole_file, write_json
from surgeon.processes.locks import locked
from surgeon.progress import progress
from surgeon.quality.tokens import Tokens
from surgeon.training.packing import Documents, Packer, Row, columns

ALL_TOKENS = 1 << 50  # more than any text has
_FORMATS: dict[Documents, int] = {"joined": 1, "apart": 1, "whole": 2}  # of windows; another one is made again
_STATE_FILE = "state.json"
_KNOWN_FILE = "known.json"
_LOCK_FILE = ".lock"
_FILE_TOKENS = 1 << 21  # no more is lost in a kill
_ROWS_AT_ONCE = 1000


class TokenSource(Protocol):
    """Where tokens come from: a text, or conversations.

    Attributes:
        source: as the user named it.
    """

    source: str

    def identity(self) -> dict[str, Any]:
        """What its tokens follow from, as JSON values."""

    def read(self) -> Iterator[list[Tokens]]:
        """Its tokens, some at a time, from where it stands."""

    def state(self) -> dict[str, Any]:
        """Where it stands behind the tokens that it gave last, as JSON values."""

    def resume(self, state: dict[str, Any]) -> None:
        """Go on where another one was that said `state`."""

    def known(self) -> dict[str, Any]:
        """What is known of the text as far as it was read, as JSON values: `column`, `left_out` and `notes`."""


class TokenStore:
    """The windows of a source.

    Args:
        window: tokens in each.
        pad: the token that fills windows of whole documents.
        cache: where folders lie; by default among those of `datasets` (HF_DATASETS_CACHE).
    """

    def __init__(
        self, source: TokenSource, window: int, documents: Documents = "joined", pad: int = 0, cache: Path | None = None
    ) -> None:
        self.source = source
        self.packer = Packer(window, documents, pad)
        follows = {
            "format": _FORMATS[documents],
            "window": window,
            "documents": documents,
            "pad": pad,
            **source.identity(),
        }
        name = hashlib.sha256(json.dumps(follows, sort_keys=True).encode()).hexdigest()[:32]
        self.folder = (cache or datasets.config.HF_DATASETS_CACHE / "surgeon") / name
        self._files: list[int] = []  # how many windows each has
        self.known: dict[str, Any] = {}

    def fill(self, windows: int) -> int:
        """See to it that there are so many windows, or all that the text has; returns how many of them there are.

        Raises:
            OSError: if the text cannot be read to there, or there is no room; what was tokenized by then stays.
            ValueError: if it is no text.
        """
        make_folder(self.folder)
        with locked(self.folder / _LOCK_FILE):
            state = self._state()
            if not state["ended"] and sum(state["files"]) < windows:
                for part in self.folder.glob(HALF_WRITTEN):  # which a process that was killed has left
                    part.unlink()
                self._extend(state, windows)
                state = self._state()
        self._files = state["files"]
        self.known = state["known"]
        return min(windows, sum(self._files))

    def rows(self, windows: range) -> datasets.Dataset:
        """Some windows that are there, mapped into memory."""
        files = [read_rows(self._path(number)) for number, count in enumerate(self._files) if count]
        return datasets.concatenate_datasets(files).select(windows)

    def digest(self, count: int) -> str:
        """SHA-256 of the first windows: of joined ones that of `surgeon.quality.data.digest_of`."""

        def compute() -> str:
            shape = repr((count, self.packer.window)).encode()
            digests = [hashlib.sha256(shape) for _ in columns(self.packer.documents)]
            for block in self._blocks(count):
                for digest, name in zip(digests, columns(self.packer.documents), strict=True):
                    digest.update(block[name].astype(np.int64).tobytes())
            first, *others = (digest.hexdigest() for digest in digests)
            if others:
                return hashlib.sha256(f"{first} {others}".encode()).hexdigest()
            return first

        return str(self.remembered(f"digest of {count}", compute))

    def shared(self, count: int, others: Tensor, digest: str) -> int:
        """How many of the first windows are among some others, (windows, tokens), which have that digest."""

        def compute() -> int:
            seen = {row.tobytes() for row in others.numpy().astype(np.int32)}
            return sum(row.tobytes() in seen for block in self._blocks(count) for row in block["input_ids"])

        return int(self.remembered(f"of {count} in {digest}", compute))

    def _state(self) -> dict[str, Any]:
        path = self.folder / _STATE_FILE
        if not path.is_file():
            return {"files": [], "ended": False, "known": {}}
        try:
            return read_json(path)
        except ValueError as error:
            raise ValueError(f"{error}; remove {self.folder}, and the text is tokenized again") from error

    def _extend(self, state: dict[str, Any], windows: int) -> None:
        if state["files"]:
            self.packer.resume(state["packer"])
            self.source.resume(state["source"])
        done = sum(state["files"])
        rows = list[Row]()

        def write(ended: bool = False) -> None:
            if rows:
                write_rows(self._path(len(state["files"])), datasets.Dataset(as_table(rows)))
            state["files"].append(len(rows))
            state.update(packer=self.packer.state(), source=self.source.state(), known=self.source.known(), ended=ended)
            write_json(self.folder / _STATE_FILE, state)
            rows.clear()

        what = f"tokens of {self.source.source}"
        total = None if windows * self.packer.window > ALL_TOKENS // 2 else windows
        with progress(what, total, "windows", done, lambda: f"{done * self.packer.window:,} by now") as advance:
            reading = self.source.read()
            while (some := _next_or(write, reading)) is not None:
                new = [row for tokens in some for row in self.packer.add(tokens)]
                rows += new
                done += len(new)
                advance(len(new))
                if done >= windows or len(rows) * self.packer.window >= _FILE_TOKENS:
                    write()
                if done >= windows:
                    return
            rows += self.packer.rest()
            write(ended=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"rows-{number:05}.arrow"

    def _blocks(self, count: int) -> Iterator[dict[str, NDArray[np.int32]]]:
        """The columns of the first windows, some at a time, (windows, tokens); read, for what is mapped stays."""
        for number, there in enumerate(self._files):
            if not there or not count:
                continue
            with pa.OSFile(str(self._path(number))) as file, pa.ipc.open_stream(file) as batches:
                for batch in batches:
                    table = batch.slice(0, count)
                    count -= len(table)
                    yield {
                        name: table[name].flatten().to_numpy().reshape(-1, self.packer.window)
                        for name in table.schema.names
                    }

    def remembered(self, what: str, compute: Callable[[], Any]) -> Any:
        """What was computed of the windows once, or is now; a JSON value."""
        path = self.folder / _KNOWN_FILE
        with locked(self.folder / _LOCK_FILE):
            known = read_json(path) if path.is_file() else {}
            if what not in known:
                known[what] = compute()
                write_json(path, known)
        return known[what]


def _next_or(keep: Callable[[], None], reading: Iterator[list[Tokens]]) -> list[Tokens] | None:
    """What is read next; if it cannot be, what there is by then is kept first."""
    try:
        return next(reading, None)
    except OSError:
        keep()
        raise


def as_table(rows: list[Row]) -> pa.Table:
    """Rows of one size as columns of Arrow."""
    window = len(rows[0]["input_ids"])
    flat = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    return pa.table({name: pa.FixedSizeListArray.from_arrays(pa.array(each), window) for name, each in flat.items()})


def write_rows(path: Path, rows: datasets.Dataset) -> None:
    """Write rows to a file of Arrow, which is whole or not there.

    Raises:
        OSError: if it cannot be written.
    """
    with whole_file(path) as beside, ArrowWriter(path=str(beside), features=rows.features) as writer:
        for table in rows.with_format("arrow").iter(_ROWS_AT_ONCE):
            writer.write_table(table)
        writer.finalize()


def read_rows(path: Path) -> datasets.Dataset:
    """The rows of a file of Arrow, which is mapped into memory.

    Raises:
        FileNotFoundError: if it is not there.
    """
    return datasets.Dataset.from_file(str(path))
