"""Text files as other programs write them: unpacked, decoded, in pieces or line by line.

Text is UTF-8. A byte order mark at its start is dropped and CRLF read as LF; both are counted. UTF-16, other encodings,
archives and NUL bytes are refused by name.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from surgeon.words import plural

PACKED = ".gz"
_FIRST_BLOCK = 1 << 16
_LARGEST_BLOCK = 1 << 22
_CONVERT = "convert it, as in: iconv -f {} -t UTF-8 {{path}} > utf8.txt"
# What a file is that begins so, and what to do; of two beginnings the longer one comes first.
_NO_TEXT = {
    codecs.BOM_UTF32_LE: ("text in UTF-32", _CONVERT.format("UTF-32")),
    codecs.BOM_UTF32_BE: ("text in UTF-32", _CONVERT.format("UTF-32")),
    codecs.BOM_UTF16_LE: ("text in UTF-16", _CONVERT.format("UTF-16")),
    codecs.BOM_UTF16_BE: ("text in UTF-16", _CONVERT.format("UTF-16")),
    b"\x1f\x8b": ("a file compressed by gzip", "give it a name that ends in .gz"),
    b"\x28\xb5\x2f\xfd": ("a file compressed by zstd", "unpack it (unzstd {path})"),
    b"\xfd7zXZ": ("a file compressed by xz", "unpack it (unxz {path})"),
    b"PK\x03\x04": ("a zip archive", "unpack it (unzip {path})"),
}
_LONGEST_MARK = max(map(len, _NO_TEXT))
_FEW = 0.1  # of the tokens of answers


@dataclass
class Reading:
    """Counts and notes of a text, as far as it has been read.

    Attributes:
        column: of a table or dataset; None for text.
        rows: of a table, read so far.
        left_out: counts of byte_order_marks, carriage_returns, null_rows, rows_without_column, empty_documents; of
            conversations rows_without_answer, rows_too_long (the first answer ends beyond the limit), answers_cut
            (beyond the limit), answers_behind_empty, answers_rewritten (read, not trained on), and rows with each key
            that is not used, as "column 'id'" or "key 'name' of messages".
        sizes: of conversations: `characters` of the `tokens`; `answer_characters` of rows, trained on or not;
            answers_across, answers whose first token begins in the prompt; and tokens `trained` on.
        notes: further ones, one line each.
    """

    column: str | None = None
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def lines(self, source: str) -> list[str]:
        count = self.left_out
        words = {
            "byte_order_marks": "the byte order mark at its start",
            "carriage_returns": f"{plural(count['carriage_returns'], 'carriage return')} of CRLF line ends",
            "null_rows": f"{plural(count['null_rows'], 'row')} with null in column {self.column!r}",
            "rows_without_column": f"{plural(count['rows_without_column'], 'row')} without column {self.column!r}",
            "empty_documents": plural(count["empty_documents"], "empty document"),
            "rows_without_answer": f"{plural(count['rows_without_answer'], 'row')} without an answer",
            "rows_too_long": f"{plural(count['rows_too_long'], 'row')} whose first answer ends behind a window's end",
            "answers_cut": f"{plural(count['answers_cut'], 'answer')} behind a window's end",
            "answers_behind_empty": f"{plural(count['answers_behind_empty'], 'answer')} behind an empty one",
            "answers_rewritten": f"the learning of {plural(count['answers_rewritten'], 'answer')} that the chat "
            "template writes in another way than the model at its turn",
        }
        words |= {
            name: f"{name} of {plural(count[name], 'row')}"
            for name in sorted(count)
            if name not in words
        }
        named = [words[name] for name in words if count[name]]
        read = ""
        if self.rows:
            read = f" (of {plural(self.rows, 'row')} read)"
        left_out = []
        if named:
            left_out = [f"{source}: left out {', '.join(named)}{read}"]
        answers = []
        size = self.sizes
        if across := size["answers_across"]:
            answers.append(
                f"{source}: {plural(across, 'answer')} that begin inside a token, together with the end of what was "
                "asked, count from that token on; a prompt that ends in a space is better without, and the answer with "
                "it"
            )
        about = round(size["answer_characters"] * size["tokens"] / max(1, size["characters"]))
        if size["trained"] < _FEW * about:
            answers.append(
                f"{source}: only {plural(size['trained'], 'token')} of answers count, where the answers in its rows "
                f"are about {about:,}; see what is left out, and one row as it is trained on (--show-row)"
            )
        return [*self.notes, *left_out, *answers]


def suffix_of(path: Path) -> str:
    """The suffix of a file in small letters, without that of compression."""
    return (path.with_suffix("") if is_packed(path) else path).suffix.lower()


def is_packed(path: Path) -> bool:
    """Tell whether a file's name ends in .gz."""
    return path.suffix.lower() == PACKED


def require_utf8(text: str, where: str) -> str:
    """Refuse text with lone surrogates, which JSON may spell out.

    Raises:
        ValueError: with the place.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}"
        raise ValueError(f"{where} is not text in UTF-8 ({half}); mend this row") from None
    return text


@contextmanager
def open_text(path: Path, reading: Reading) -> Iterator[BinaryIO]:
    """Open a file's bytes, unpacked, behind a byte order mark."""
    try:
        with gzip.open(path) if is_packed(path) else path.open("rb") as opened:
            file = cast("BinaryIO", opened)
            start = file.read(_LONGEST_MARK)
            for mark, (what, advice) in _NO_TEXT.items():
                if start.startswith(mark):
                    bytes_ = mark.hex(" ").upper()
                    raise ValueError(
                        f"{path} begins as {what} does ({bytes_}); {advice.format(path=path)}"
                    )
            marked = start.startswith(codecs.BOM_UTF8)
            reading.left_out["byte_order_marks"] += marked
            file.seek(len(codecs.BOM_UTF8) if marked else 0)
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} is truncated or not compressed by gzip ({error}); fetch or copy it again"
        ) from error


def read_pieces(path: Path, reading: Reading | None = None) -> Iterator[str]:
    """Read a text file in pieces, each twice as long as the last, so that joining them stays cheap."""
    reading = reading or Reading()
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_text(path, reading) as file:
        size = _FIRST_BLOCK
        before = file.tell()
        begun = ""
        while True:
            block = file.read(size)
            if (place := block.find(0)) >= 0:
                raise ValueError(
                    f"{path} is no text: byte {before + place} is NUL, as in a binary file, or in UTF-16 without a "
                    "byte order mark; convert it, or give another file"
                )
            # The beginning of a character that the last block ended in.
            carried = len(decoder.getstate()[0])
            try:
                piece = begun + decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, before - carried + error.start) from error
            # Of a line end, perhaps.
            begun = ""
            if block and piece.endswith("\r"):
                begun = "\r"
            piece = piece.removesuffix(begun)
            reading.left_out["carriage_returns"] += piece.count("\r\n")
            yield piece.replace("\r\n", "\n")
            if not block:
                return
            before = before + len(block)
            size = min(2 * size, _LARGEST_BLOCK)


def _not_utf8(where: object, byte: int) -> ValueError:
    return ValueError(f"{where} is not UTF-8 text (byte {byte}); convert it, or give another file")


def read_json_lines(path: Path, reading: Reading | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the objects of a file with one on each line, with line numbers; blank lines are skipped."""
    with open_text(path, reading or Reading()) as file:
        before = file.tell()
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                # Joined files have byte order marks inside.
                text = line.decode().removeprefix("\ufeff")
                row = None
                if text.strip():
                    row = json.loads(text)
            except UnicodeDecodeError as error:
                raise _not_utf8(where, before + error.start) from error
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{where}: not valid JSON ({error}); each line must be one object"
                ) from error
            if text.strip():
                if not isinstance(row, dict):
                    raise ValueError(
                        f"{where}: each line must be one JSON object, not {type(row).__name__}"
                    )
                yield number, row
            before += len(line)
