"""Options that several commands have, each declared once. Use as `data: Data` among a command's parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from surgeon.commands.command import option

if TYPE_CHECKING:
    from pathlib import Path

    from surgeon.opened import Model

DEFAULT_TOKENS = 8192  # surgeon.quality.data.DEFAULT_TOKENS, which is not light

DATA_HELP = (
    "Text to measure on: a UTF-8 text file, a .jsonl or .parquet file (as file:column where it is not clear which "
    "column is meant), a folder of such files, a dataset as name[:config[:split[:column]]], or demo (source files of "
    "the Python standard library). What is left out of it, such as rows without text, is said (docs/texts.md)."
)

ModelName = Annotated[
    "str | Path | Model", option("A model: a checkpoint folder, a name on the Hugging Face hub, or demo.", kind=str)
]
Data = Annotated["str | Path", option(DATA_HELP, "--data", kind=str)]
DefaultData = Annotated[
    "str | Path | None",
    option(
        DATA_HELP + " Without it demo, which is said, where the model's tokenizer has tokens for that.",
        "--data",
        kind=str,
    ),
]
Output = Annotated["str | Path", option("Folder for the results; made if missing.", "--output", "-o", kind=str)]
Tokens = Annotated[int, option("Tokens to measure on, from the start of the data.")]
Window = Annotated[int | None, option("Tokens in a window. Default: 512, or the model's positions if it has fewer.")]
Separator = Annotated[
    str | None,
    option(
        "Text between the documents of the data, such as '<|endoftext|>': they are kept apart, each begun with the "
        "tokenizer's BOS. Rows of a table or a dataset are documents of their own then."
    ),
]
Memory = Annotated[
    int | str | None,
    option("The most memory the process may take, model included, such as 512MB or 2GB.", kind=str),
]
SampledAcceptance = Annotated[
    bool,
    option(
        "Besides greedy acceptance, measure how often a token that a program draws would be accepted as one of the "
        "original's: sum_v min(p_v, q_v), the mean over tokens.",
    ),
]
