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
    from surgeon.quality.tables import is_table, read_table
    from surgeon.quality.text_files import read_pieces

    if is_table(path):
        for number, (where, text) in enumerate(read_table(path, FIELD), start=1):
            if text is None:  # to leave it out would shift what is written for the others
                raise ValueError(f"{where}: the row has no {FIELD!r}; every row needs one")
            yield f"{path}: prompt {number}", text
        return
    lines = "".join(read_pieces(path)).split("\n")
    found = [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{path} is empty; write one prompt on each line")
    yield from found
