"""`surgeon spectrum`, `surgeon.spectrum`: singular values of every matrix, and the damage of lower ranks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mode
from typing import TYPE_CHECKING, Annotated, Literal, Unpack

from surgeon.commands.command import command, option, several
from surgeon.commands.options import Data, ModelName, Output, TextFlags
from surgeon.quality import DEFAULT_TOKENS

if TYPE_CHECKING:
    from surgeon.findings.spectrum import Spectrum


@command()
def spectrum(
    model: ModelName,
    data: Data,
    output: Output = "runs/spectrum",
    *,
    layers: Annotated[
        range | str | None, option("Only these layers; 4:30 is layers 4 to 29. Default: all.")
    ] = None,
    weights: Annotated[
        str | Sequence[str] | None,
        several(
            "Only these matrices, such as q,k or gate,up,down (also v and o). Default: all that the model has."
        ),
    ] = None,
    ranks: Annotated[
        str | float | Sequence[str | float],
        several(
            "Ranks to cut each matrix down to: shares of its full rank (1/8 or 0.125), or whole numbers. Default: "
            "1/8,1/4,1/2,3/4."
        ),
    ] = "1/8,1/4,1/2,3/4",
    method: Annotated[
        Literal["whitened", "plain"],
        option(
            "whitened: keep what matters most for the inputs that the matrix gets (SVD-LLM). plain: keep the largest "
            "singular values of the matrix itself."
        ),
    ] = "whitened",
    damage: Annotated[bool, option("Only singular values; do not measure what lower ranks do.")] = True,
    keep: Annotated[
        float | None,
        option(
            "Also write recipe.yaml: a rank for each matrix, so that they keep this share of their parameters in all "
            "(0.6, say)."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        option(
            "The same with another limit than --keep: params=3M, weight_bytes=20MB, or wire_bytes=40KB, what one "
            "token's reductions and gatherings send in all layers; or times as much as whole matrices, as "
            "wire_bytes=0.5x. Numbers count as large as the checkpoint's."
        ),
    ] = None,
    allocation: Annotated[
        Literal["damage", "energy", "uniform"],
        option(
            "How that is shared out. damage: so that the damage measured adds up to the least, and again with what the "
            "matrices of each layer do together. energy: every matrix keeps the same share of the squares of its "
            "singular values. uniform: of its parameters."
        ),
    ] = "damage",
    calibration: Annotated[
        str | Path | None,
        option(
            "Text whose activations whiten, as for --data. Default: what follows the measured tokens in --data, and of "
            "a short text a tenth.",
            kind=str,
        ),
    ] = None,
    calibration_tokens: Annotated[
        int,
        option("Tokens of it. More whiten better; they should be many times a matrix's input features."),
    ] = 32768,
    **measured: Unpack[TextFlags],
) -> Spectrum:
    """Find the singular values of every matrix, and measure what each one cut down to a lower rank does.

    Singular values are of the matrix W, and of W S with S S' = X'X for its inputs X on calibration text: the squares
    of those left out then add up to the squared error of the outputs. Each matrix is cut down alone, and perplexity
    and divergence from the original are measured with 95% intervals over windows of text.

    Writes spectrum.csv (ranks that hold 90, 95 and 99% of the energy), singular_values.csv, damage.csv, spectrum.json
    and PNG files, and with --keep or --budget a recipe for surgeon export. Layers count from 0. Interrupted, the same
    command goes on where it was; other ranks, layers or matrices of the same model and text are added.

    Raises:
        FileNotFoundError, ValueError: if model, text, layers, matrices, ranks or budget cannot be used.
        OSError: if the folder cannot be written to.
    """
    from surgeon.analysis.factors.ranks import (
        RankBudget,
        corrected_ranks,
        parse_budget,
        write_recipe,
    )
    from surgeon.analysis.spectrum import notes_on, request
    from surgeon.analysis.spectrum import spectrum as find
    from surgeon.analysis.subject import load_calibration, open_subject
    from surgeon.commands.command import as_list, as_range, warn
    from surgeon.findings.spectrum import parse_ranks
    from surgeon.named import split_values
    from surgeon.opened import open_model
    from surgeon.quality.data import tokens_before_rest, window_for

    opened = open_model(model)
    folder = Path(output)
    # What is wrong with the request is said before a large model is loaded.
    wanted = request(
        opened.config,
        layers=as_range(layers),
        weights=None if weights is None else split_values(as_list(weights)),
        ranks=parse_ranks(",".join(as_list(ranks))) if damage else (),
        method=method,
    )
    share = None
    if keep is not None and budget is not None:
        raise ValueError(f"keep {keep:g} is the same as the budget params={keep:g}x; give one of them")
    if (keep, budget) != (None, None) and allocation == "damage" and not damage:
        raise ValueError(
            "allocation by damage goes by what is left out here; use energy or uniform, or measure damage"
        )
    if keep is not None:
        share = RankBudget("params", keep, relative=True, allocation=allocation)
    elif budget is not None:
        checkpoint = opened.checkpoint
        number_bytes = mode(checkpoint.dtype(name).itemsize for name in checkpoint.names())
        share = parse_budget(budget, number_bytes, allocation)
    other = None
    if calibration is not None:
        other = str(calibration)
    tokens = measured.get("tokens", DEFAULT_TOKENS)
    window = measured.get("window")
    separator = measured.get("separator")
    if other is None:
        size = window_for(opened.config, window)
        tokens = tokens_before_rest(opened.tokenizer, str(data), size, tokens, separator)
    text = load_calibration(opened, str(data), tokens, calibration_tokens, window, separator, other)
    subject = open_subject(opened, data, tokens, window, separator)
    warn(text.notes)
    size = text.ids.shape[1]
    found = find(subject, text, folder, wanted, after=0 if other is not None else tokens // size * size)
    warn(notes_on(found.matrices))
    files = [*found.files, *found.draw(folder)]
    if share is not None:
        if share.allocation == "damage":  # again, with what the matrices of each layer do together
            scratch = folder / "factors"
            how = found.record["method"]
            chosen = corrected_ranks(subject, found.curves, share, how, text, scratch)
            shutil.rmtree(scratch)
        else:
            chosen = share.ranks(found.curves)
        files.append(
            write_recipe(folder, subject, found, share, chosen, found.record["calibration_text"])
        )
    return replace(found, files=tuple(files))
