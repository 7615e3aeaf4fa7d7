"""Windows of tokens on the disk: a text is tokenized once, as far as runs need it, and mapped into memory from then on.

FOLDER/rows.arrow   windows, as `surgeon.training.packing` makes them
FOLDER/known.json   how many, whether these are all, and what of the text was left out

A folder's name follows from the text, the tokenizer and how it is packed; it is whole or not there. Where more windows
are needed than it has, it is made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets.arrow_writer import ArrowWriter

from surgeon.checkpoint.read import read_json
from surgeon.processes.files import make_folder, sync_tree, whole_file, write_json
from surgeon.processes.folders import publish, scratch
from surgeon.processes.locks import locked
from surgeon.progress import progress
from surgeon.quality.conversations import read_conversations
from surgeon.quality.sources import DEMO, DEMO_TRAINING, are_apart, documents, file_and_column, files_in, is_folder
from surgeon.quality.tables import is_table
from surgeon.quality.text_files import Reading
from surgeon.quality.tokens import TextTokens, Tokens, tokenizer_digest
from surgeon.training.packing import Documents, Packer, Row, columns

SELF = "self"  # text that the original of an edited model writes (`surgeon.training.self_text`)
ALL_TOKENS = 1 << 50  # more than any text has
_FORMAT = 3  # of windows, and of how rows come to be tokens; another one is made again
_ROWS_FILE = "rows.arrow"
_KNOWN_FILE = "known.json"
ROWS_AT_ONCE = 1000


class TextSource:
    """A text, or conversations, as windows on the disk.

    Attributes:
        endless: whether there is as much of it as is asked for.

    Args:
        data, separator: as `load_windows` takes them.
        documents: other than joined, a text without a separator is by rows and files.
        chats: whether it holds conversations.

    Raises:
        ValueError: if documents are to be apart, and it is one text, or the tokenizer has no marks to put between.
        FileNotFoundError: if it is no text.
    """

    endless = False

    def __init__(
        self,
        tokenizer: Any,
        data: str,
        window: int,
        documents: Documents = "joined",
        separator: str | None = None,
        chats: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.source = data
        self.window = window
        self.documents = documents
        self.separator = separator
        self.chats = chats
        self.by_row = documents != "joined"
        self.apart = data == SELF or are_apart(data, separator, self.by_row)
        self.files = list[Path]()
        if data == SELF:
            pass  # which is no file, whatever there is of that name
        elif is_folder(data):
            self.files = files_in(data)
        elif (path := file_and_column(data)[0]) is not None:
            self.files = [path]
            if self.by_row and separator is None and not is_table(path):
                raise ValueError(
                    f"{data} is one text, whose documents cannot be told apart; give the separator between them, or "
                    "join them"
                )
        ends = (tokenizer.pad_token_id, tokenizer.eos_token_id)
        self.pad = 0  # the token that fills windows
        if not chats:
            self.pad = int(next((one for one in ends if one is not None), 0))

    def identity(self) -> dict[str, Any]:
        """What its windows follow from, as JSON values: of files name, size and time; of the demo's text itself."""
        files: list[Any] = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in self.files]
        if self.source in (DEMO, DEMO_TRAINING):
            files = [hashlib.sha256("".join(chain(*documents(self.source, None))).encode()).hexdigest()]
        return {
            "format": _FORMAT,
            "text": self.source,
            "files": files,
            "separator": self.separator,
            "documents": self.documents,
            "window": self.window,
            "pad": self.pad,
            "tokenizer": tokenizer_digest(self.tokenizer),
            "chat_template": self.tokenizer.chat_template if self.chats else None,
        }

    def tokens(self, reading: Reading) -> Iterator[list[Tokens]]:
        """Its tokens, some at a time; no conversation is longer than a window."""
        if self.chats:
            found = read_conversations(self.tokenizer, self.source, self.window, reading) or ()
            return ([Tokens(np.array(each.ids, np.int32), np.array(each.answers, np.bool_))] for each in found)
        texts = documents(self.source, self.separator, reading, self.by_row)
        return TextTokens(self.tokenizer, self.apart).read(texts)

    def windows(self, count: int, cache: Path | None = None) -> tuple[datasets.Dataset, dict[str, Any]]:
        """So many windows, or all that there are; and what is known of the text as far as it was read.

        Raises:
            OSError: if the text cannot be read to there, or there is no room.
            ValueError: if it is no text.
        """
        name = hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:32]
        folder = (cache or datasets.config.HF_DATASETS_CACHE / "surgeon") / name
        make_folder(folder.parent)
        with locked(folder.with_suffix(".lock")):
            path = folder / _KNOWN_FILE
            known = read_json(path) if path.is_file() else {"windows": 0, "ended": False}
            if known["windows"] < count and not known["ended"]:
                with scratch(folder) as beside:
                    known = self._write(beside / _ROWS_FILE, count)
                    write_json(beside / _KNOWN_FILE, known)
                    sync_tree(beside)
                    publish(beside, folder)
            rows = datasets.Dataset.from_file(str(folder / _ROWS_FILE))
        return rows.select(range(min(count, known["windows"]))), known

    def _write(self, path: Path, count: int) -> dict[str, Any]:
        reading = Reading()
        packer = Packer(self.window, self.documents, self.pad)
        names = columns(self.documents)
        done = 0
        ended = False
        total = None if count * self.window > ALL_TOKENS // 2 else count
        with (
            ArrowWriter(path=str(path), schema=as_table([], names, self.window).schema) as writer,
            progress(f"tokens of {self.source}", total, "windows", 0, lambda: f"{done * self.window:,} by now") as bar,
        ):
            reads = self.tokens(reading)
            while done < count and not ended:
                some = next(reads, None)
                ended = some is None
                rows = [*packer.rest()] if some is None else [row for one in some for row in packer.add(one)]
                writer.write_table(as_table(rows, names, self.window))
                done += len(rows)
                bar(len(rows))
            writer.finalize()
        notes = reading.lines(self.source)
        left_out = dict(+reading.left_out)
        return {"windows": done, "ended": ended, "column": reading.column, "left_out": left_out, "notes": notes}


def rows_digest(rows: datasets.Dataset, window: int) -> str:
    """SHA-256 of windows: of joined ones that of `surgeon.quality.data.digest_of`."""
    digests = {name: hashlib.sha256(repr((len(rows), window)).encode()) for name in rows.column_names}
    for block in rows.with_format("numpy").iter(ROWS_AT_ONCE):
        for name, digest in digests.items():
            digest.update(block[name].astype(np.int64).tobytes())
    first, *others = (digest.hexdigest() for digest in digests.values())
    if others:
        return hashlib.sha256(f"{first} {others}".encode()).hexdigest()
    return first


def as_table(rows: list[Row], names: tuple[str, ...], window: int) -> pa.Table:
    """Rows as columns of Arrow."""
    flat = {name: np.array([row[name] for row in rows], np.int32).reshape(-1) for name in names}
    return pa.table({name: pa.FixedSizeListArray.from_arrays(pa.array(each), window) for name, each in flat.items()})


def write_rows(path: Path, rows: datasets.Dataset) -> None:
    """Write rows to a file of Arrow, which is whole or not there.

    Raises:
        OSError: if it cannot be written.
    """
    with whole_file(path) as beside, ArrowWriter(path=str(beside), features=rows.features) as writer:
        for table in rows.with_format("arrow").iter(ROWS_AT_ONCE):
            writer.write_table(table)
        writer.finalize()
