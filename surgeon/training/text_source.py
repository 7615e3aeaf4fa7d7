"""Texts as sources of tokens: files, tables, folders of them, datasets as streams."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

from surgeon.quality.sources import DEMO, DEMO_TRAINING, are_apart, documents, file_and_column, files_in, is_folder
from surgeon.quality.tables import is_table
from surgeon.quality.text_files import Reading
from surgeon.quality.tokens import TextTokens, Tokens, tokenizer_digest
from surgeon.training.packing import Documents


class TextSource:
    """A text as tokens, for a `TokenStore`.

    Args:
        data, separator: as `load_windows` takes them.
        documents: other than joined, a text without a separator is by rows and files.

    Raises:
        ValueError: if documents are to be apart, and it is one text, or the tokenizer has no marks to put between.
        FileNotFoundError: if it is no text.
    """

    def __init__(self, tokenizer: Any, data: str, separator: str | None, documents: Documents) -> None:
        self.source = data
        self.separator = separator
        self.by_row = documents != "joined"
        self.apart = are_apart(data, separator, self.by_row)
        path, _ = (None, None) if is_folder(data) else file_and_column(data)
        if self.by_row and separator is None and path is not None and not is_table(path):
            raise ValueError(
                f"{data} is one text, whose documents cannot be told apart; give the separator between them, or join "
                "them"
            )
        self._files = files_in(data) if path is None and is_folder(data) else [path] if path is not None else []
        self._tokens = TextTokens(tokenizer, self.apart)
        self._reading = Reading()
        self._tokenizer = tokenizer

    def identity(self) -> dict[str, Any]:
        """The text's name, and the size and the time of its files; of the demo's, what it says."""
        files: list[Any] = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in self._files]
        if self.source in (DEMO, DEMO_TRAINING):
            files = [hashlib.sha256("".join(chain(*documents(self.source, None))).encode()).hexdigest()]
        follows = {"text": self.source, "files": files, "separator": self.separator, "by_row": self.by_row}
        if self.separator is not None or self.by_row:
            follows["ends"] = "as they are"  # of documents, which once were stripped
        return follows | {"tokenizer": tokenizer_digest(self._tokenizer)}

    def read(self) -> Iterator[list[Tokens]]:
        """As `TokenSource` has it."""
        return self._tokens.read(documents(self.source, self.separator, self._reading, self.by_row))

    def state(self) -> dict[str, Any]:
        """As `TokenSource` has it."""
        return self._tokens.state()

    def resume(self, state: dict[str, Any]) -> None:
        """As `TokenSource` has it; the text is read again up to there, and not tokenized."""
        self._tokens.resume(state)

    def known(self) -> dict[str, Any]:
        """As `TokenSource` has it."""
        reading = self._reading
        left_out = dict(+reading.left_out)
        return {"column": reading.column, "left_out": left_out, "notes": reading.lines(self.source)}
