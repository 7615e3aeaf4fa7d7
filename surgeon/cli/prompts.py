"""Reading the texts that a command is to go on from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

FIELD = "prompt"  # of a table's rows


def read_prompts(given: Sequence[str], file: Path | None) -> dict[str, str]:
    """The prompts by where they stand, such as "prompts.txt:3": those given in the command line, then a file's.

    A text file has one on each line, blank lines left out; the rows of a .jsonl or .parquet file have it as "prompt".

    Raises:
        FileNotFoundError, OSError: if the file cannot be read.
        ValueError: if there are none, the file is not text, or a row of it has none.
    """
    prompts = {f"--prompt {number}": prompt for number, prompt in enumerate(given, start=1)}
    if file is not None:
        prompts |= dict(_of_file(file))
    if not prompts:
        raise ValueError("there is nothing to go on from; give --prompt TEXT or --prompts FILE")
    return prompts


def _of_file(path: Path) -> Iterator[tuple[str, str]]:
    from surgeon.quality.sources import is_table, read_table

    if is_table(path):
        yield from ((f"{path}: prompt {number}", text) for number, text in enumerate(read_table(path, FIELD), start=1))
        return
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it, or give another file") from error
    found = [(f"{path}:{number}", line.removesuffix("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{path} is empty; write one prompt on each line")
    yield from found
