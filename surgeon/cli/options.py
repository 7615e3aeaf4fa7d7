"""Arguments and options that several commands have in common, with one wording each.

Light, like every module here: typer and the standard library. Use as `data: DataOption` among a command's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.named import split_values

if TYPE_CHECKING:
    pass

DEFAULT_TOKENS = 8192  # surgeon.quality.data.DEFAULT_TOKENS, which is not light

DATA_HELP = (
    "Text to measure on: a UTF-8 text file, a .jsonl or .parquet file (as file:column where it is not clear which "
    "column is meant), a folder of such files, a dataset as name[:config[:split[:column]]], or demo (source files of "
    "the Python standard library). What is left out of it, such as rows without text, is said (docs/texts.md)."
)


def _each(values: list[Any] | None) -> list[Any] | None:
    """Every value by itself, of the same type."""
    if not values:
        return values
    found = split_values(map(str, values))
    if not found:
        raise ValueError(f"{','.join(map(str, values))!r} names nothing; give one value or more, with commas between")
    return [type(values[0])(one) for one in found]


def several(*names: str, help: str, metavar: str | None = None) -> Any:
    """An option that takes several values, with commas between or the option again; of the type `list[...]`."""
    return typer.Option(*names, help=f"{help} Several by commas, or the option again.", metavar=metavar, callback=_each)


ModelArgument = Annotated[
    str, typer.Argument(help="A model: a checkpoint folder, a name on the Hugging Face hub, or demo.")
]
DefaultDataOption = Annotated[
    str | None,
    typer.Option(
        "--data", help=DATA_HELP + " Without it demo, which is said, where the model's tokenizer has tokens for that."
    ),
]
DefaultOutputOption = Annotated[str, typer.Option("--output", "-o", help="Folder for the results; made if missing.")]
TokensOption = Annotated[int, typer.Option("--tokens", help="Tokens to measure on, from the start of the data.")]
WindowOption = Annotated[
    int | None,
    typer.Option("--window", help="Tokens in a window. Default: 512, or the model's positions if it has fewer."),
]
SeparatorOption = Annotated[
    str | None,
    typer.Option(
        "--separator",
        help="Text between the documents of the data, such as '<|endoftext|>': they are kept apart, each begun with "
        "the tokenizer's BOS. Rows of a table or a dataset are documents of their own then.",
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", help="The most memory the process may take, model included, such as 512MB or 2GB."),
]
SampledOption = Annotated[
    bool,
    typer.Option(
        "--sampled-acceptance",
        help="Besides greedy acceptance, measure how often a token that a program draws would be accepted as one of "
        "the original's: sum_v min(p_v, q_v), the mean over tokens.",
    ),
]


@dataclass(frozen=True)
class TextArguments:
    """Which part of the data is measured on, and how it is cut; a group of options (see grouped.py)."""

    tokens: TokensOption = DEFAULT_TOKENS
    window: WindowOption = None
    separator: SeparatorOption = None
