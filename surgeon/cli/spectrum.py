"""`surgeon spectrum`: the singular values of a model's matrices, and what cutting them down to lower ranks does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.options import DataOption, DefaultOutputOption, ModelArgument, TextArguments, several


@dataclass(frozen=True)
class MatrixArguments:
    """Which matrices, and what is done to them, in the user's words; a group of options (see grouped.py)."""

    layers: Annotated[str | None, typer.Option(help="Only these layers; 4:30 is layers 4 to 29. Default: all.")] = None
    weights: Annotated[
        list[str] | None,
        several(
            "--weights",
            help="Only these matrices, such as q,k or gate,up,down (also v and o). Default: all that the model has.",
        ),
    ] = None
    ranks: Annotated[
        list[str] | None,
        several(
            "--ranks",
            help="Ranks to cut each matrix down to: shares of its full rank (1/8 or 0.125), or whole numbers. Default: "
            "1/8,1/4,1/2,3/4.",
        ),
    ] = None
    method: Annotated[
        Literal["whitened", "plain"],
        typer.Option(
            help="whitened: keep what matters most for the inputs that the matrix gets (SVD-LLM). plain: keep the "
            "largest singular values of the matrix itself."
        ),
    ] = "whitened"
    no_damage: Annotated[
        bool, typer.Option("--no-damage", help="Only singular values; do not measure what lower ranks do.")
    ] = False


@dataclass(frozen=True)
class ShareArguments:
    """Ranks under a budget, in the user's words; a group of options (see grouped.py)."""

    keep: Annotated[
        float | None,
        typer.Option(
            help="Also write recipe.yaml: a rank for each matrix, so that they keep this share of their parameters in "
            "all (0.6, say)."
        ),
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(
            help="The same with another limit than --keep: params=3M, weight_bytes=20MB, or wire_bytes=40KB, what one "
            "token's reductions and gatherings send in all layers; or times as much as whole matrices, as "
            "wire_bytes=0.5x. Numbers count as large as the checkpoint's."
        ),
    ] = None
    allocation: Annotated[
        Literal["damage", "energy", "uniform"],
        typer.Option(
            help="How that is shared out. damage: so that the damage measured adds up to the least, and again with "
            "what the matrices of each layer do together. energy: every matrix keeps the same share of the squares of "
            "its singular values. uniform: of its parameters."
        ),
    ] = "damage"


@dataclass(frozen=True)
class CalibrationArguments:
    """The text that whitens, in the user's words; a group of options (see grouped.py)."""

    calibration: Annotated[
        str | None,
        typer.Option(
            help="Text whose activations whiten, as for --data. Default: what follows the measured tokens in --data, "
            "and of a short text a tenth."
        ),
    ] = None
    calibration_tokens: Annotated[
        int, typer.Option(help="Tokens of it. More whiten better; they should be many times a matrix's input features.")
    ] = 32768


@grouped
def spectrum(
    model: ModelArgument,
    data: DataOption,
    output: DefaultOutputOption = "runs/spectrum",
    *,
    matrices: MatrixArguments,
    ranks: ShareArguments,
    whitening: CalibrationArguments,
    text: TextArguments,
) -> None:
    """Find the singular values of every matrix, and measure what each one cut down to a lower rank does.

    Singular values are of the matrix W, and of W S with S S' = X'X for its inputs X on calibration text: the squares
    of those left out then add up to the squared error of the outputs. Each matrix is cut down alone, and perplexity
    and divergence from the original are measured with 95% intervals over windows of text.

    Writes spectrum.csv (ranks that hold 90, 95 and 99% of the energy), singular_values.csv, damage.csv, spectrum.json
    and PNG files, and with --keep or --budget a recipe for surgeon export. Layers count from 0. Interrupted, the same
    command goes on where it was; other ranks, layers or matrices of the same model and text are added to what the
    folder has.
    """
    from surgeon.library.spectrum import spectrum as find_spectrum

    found = find_spectrum(
        model,
        data,
        output,
        layers=matrices.layers,
        weights=matrices.weights,
        ranks=matrices.ranks or "1/8,1/4,1/2,3/4",
        method=matrices.method,
        damage=not matrices.no_damage,
        **vars(ranks),
        **vars(whitening),
        **vars(text),
    )
    base, predicted = found.record["base_perplexity"], found.record["tokens_predicted"]
    typer.echo(f"base perplexity {base:.4g} over {predicted:,} predicted tokens\n")
    typer.echo(str(found))
    for path in found.files:
        typer.echo(str(path))
