"""`surgeon spectrum`: the singular values of a model's matrices, and what cutting them down to lower ranks does."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from surgeon.cli.opening import open_measured, warn
from surgeon.cli.options import (
    DEFAULT_TOKENS,
    DataOption,
    ModelArgument,
    OutputOption,
    SeparatorOption,
    TokensOption,
    WindowOption,
)


def spectrum(
    model: ModelArgument,
    data: DataOption,
    output: OutputOption,
    layers: Annotated[
        str | None,
        typer.Option(help="Only these layers; 4:30 is layers 4 to 29. Default: all.", show_default=False),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Only these matrices, such as q,k or gate,up,down (also v and o). Default: all that the model has.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        str,
        typer.Option(
            help="Ranks to cut each matrix down to: shares of its full rank (1/8 or 0.125), or whole numbers."
        ),
    ] = "1/8,1/4,1/2,3/4",
    method: Annotated[
        Literal["whitened", "plain"],
        typer.Option(
            help="whitened: keep what matters most for the inputs that the matrix gets (SVD-LLM). plain: keep the "
            "largest singular values of the matrix itself."
        ),
    ] = "whitened",
    no_damage: Annotated[
        bool, typer.Option("--no-damage", help="Only singular values; do not measure what lower ranks do.")
    ] = False,
    keep: Annotated[
        float | None,
        typer.Option(
            help="Also write recipe.yaml: a rank for each matrix, so that they keep this share of their parameters in "
            "all (0.6, say).",
            show_default=False,
        ),
    ] = None,
    allocation: Annotated[
        Literal["damage", "energy", "uniform"],
        typer.Option(
            help="How --keep is shared out. damage: so that the damage measured adds up to the least. energy: every "
            "matrix keeps the same share of the squares of its singular values. uniform: of its parameters."
        ),
    ] = "damage",
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Text whose activations whiten, as for --data. Default: what follows the measured tokens in --data.",
            show_default=False,
        ),
    ] = None,
    calibration_tokens: Annotated[
        int,
        typer.Option(help="Tokens of it. More whiten better; they should be many times a matrix's input features."),
    ] = 32768,
    tokens: TokensOption = DEFAULT_TOKENS,
    window: WindowOption = None,
    separator: SeparatorOption = None,
) -> None:
    """Find the singular values of every matrix, and measure what each one cut down to a lower rank does.

    Singular values are of the matrix W, and of W S with S S' = X'X for its inputs X on calibration text: the squares
    of those left out then add up to the squared error of the outputs. Each matrix is cut down alone, and perplexity
    and divergence from the original are measured with 95% intervals over windows of text.

    Writes spectrum.csv (ranks that hold 90, 95 and 99% of the energy), singular_values.csv, damage.csv, spectrum.json
    and PNG files, and with --keep a recipe for surgeon export. Layers count from 0. Interrupted, the same command goes
    on where it was; other ranks, layers or matrices of the same model and text are added to what the folder has.
    """
    from surgeon.analysis.calibration import load_calibration, recorded
    from surgeon.analysis.matrices import parse_ranks, parse_weights
    from surgeon.analysis.rank_recipe import Share, write_recipe
    from surgeon.analysis.spectrum import request
    from surgeon.analysis.spectrum import spectrum as find_spectrum
    from surgeon.analysis.spectrum_tables import notes_on
    from surgeon.checkpoint.load import read_config
    from surgeon.checkpoint.read import Checkpoint, locate
    from surgeon.recipe import parse_range
    from surgeon.report.spectrum import draw_spectrum, print_spectrum

    share = None if keep is None else Share(keep, allocation)
    if share is not None and allocation == "damage" and no_damage:
        raise ValueError("--allocation damage goes by what --no-damage leaves out; use --allocation energy or uniform")
    # What is wrong with the options is said before a large model is loaded.
    wanted = request(
        read_config(Checkpoint(locate(model))),
        layers=None if layers is None else parse_range(layers),
        weights=None if weights is None else parse_weights(weights),
        ranks=() if no_damage else parse_ranks(ranks),
        method=method,
    )
    whitening = load_calibration(model, data, tokens, calibration_tokens, window, separator, calibration)
    subject = open_measured(model, data, tokens, window, separator)
    warn(whitening.notes)
    record = subject.provenance(
        calibration=whitening.source, calibration_hash=whitening.digest, calibration_tokens=whitening.ids.numel()
    )
    found = find_spectrum(
        subject.model,
        subject.windows,
        whitening,
        output,
        wanted,
        model_hash=subject.model_hash,
        record=record,
    )
    warn(notes_on(found.matrices))
    pictures = draw_spectrum(found, wanted.ranks, output, subject.label)
    base = found.record["base_perplexity"]
    typer.echo(f"base perplexity {base:.4g} over {subject.windows.predicted:,} predicted tokens\n")
    print_spectrum(found, wanted.ranks)
    files = [*found.files, *pictures]
    if share is not None:
        size = subject.windows.ids.shape[1]
        text = recorded(whitening, after=0 if calibration is not None else tokens // size * size)
        files.append(write_recipe(output, subject, found, share, text))
    for path in files:
        typer.echo(str(path))
