"""`surgeon.spectrum`: singular values of every matrix, what lower ranks do, and ranks under a budget as a recipe."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mode
from typing import Literal

from surgeon.analysis.factors.allocation import Allocation
from surgeon.analysis.factors.calibration import load_calibration
from surgeon.analysis.factors.matrices import parse_weights
from surgeon.analysis.factors.rank_recipe import RankBudget, Share, corrected_ranks, parse_budget, write_recipe
from surgeon.analysis.spectrum import request
from surgeon.analysis.spectrum import spectrum as find_spectrum
from surgeon.analysis.spectrum_tables import notes_on
from surgeon.analysis.subject import open_subject
from surgeon.findings.spectrum import Spectrum, parse_ranks
from surgeon.library.opening import as_range, warn
from surgeon.opened import Model, open_model
from surgeon.quality.data import DEFAULT_TOKENS, tokens_before_rest, window_for


def spectrum(
    model: str | Path | Model,
    data: str | Path,
    output: str | Path,
    *,
    layers: range | str | None = None,
    weights: Sequence[str] | str | None = None,
    ranks: str | float | Sequence[str | float] = "1/8,1/4,1/2,3/4",
    method: Literal["whitened", "plain"] = "whitened",
    damage: bool = True,
    keep: float | None = None,
    budget: str | None = None,
    allocation: Allocation = "damage",
    calibration: str | Path | None = None,
    calibration_tokens: int = 32768,
    tokens: int = DEFAULT_TOKENS,
    window: int | None = None,
    separator: str | None = None,
) -> Spectrum:
    """Find the singular values of every matrix, and measure what each one cut down to a lower rank does.

    Args:
        model: a folder, a hub name, "demo", or a model that is open.
        data: a text file, a table or a dataset (docs/texts.md), or "demo".
        output: folder for tables, pictures and a recipe; what is there already is gone on with.
        layers: only these; "4:30" is layers 4 to 29.
        weights: only these matrices, as in "q,k"; by default all that the model has.
        ranks: to cut each matrix down to: shares of its full rank, or whole numbers.
        method: "whitened" keeps what matters most for the inputs that a matrix gets (SVD-LLM), "plain" the largest
            singular values of the matrix itself.
        damage: measure what lower ranks do, too.
        keep: also write a recipe in which matrices keep this share of their parameters in all.
        budget: the same with another limit: params=3M, weight_bytes=20MB, wire_bytes=0.5x.
        allocation: how that is shared out: by "damage", "energy", or "uniform".
        calibration: text whose activations whiten; by default what follows the measured tokens in `data`, of which at
            least a tenth is left for it (16,384 tokens at most).
        calibration_tokens: of it.
        tokens: of the text, in windows of `window`; documents are apart at `separator`.

    Raises:
        FileNotFoundError, ValueError: if the model or a text cannot be used, it has no such layers or matrices, or a
            rank or a budget makes no sense.
        OSError: if the folder cannot be written to.
    """
    opened, folder = open_model(model), Path(output)
    # What is wrong with the request is said before a large model is loaded.
    wanted = request(
        opened.config,
        layers=as_range(layers),
        weights=None if weights is None else parse_weights(weights if isinstance(weights, str) else ",".join(weights)),
        ranks=parse_ranks(_as_text(ranks)) if damage else (),
        method=method,
    )
    share = _share(opened, keep, budget, allocation, damage)
    other = None if calibration is None else str(calibration)
    if other is None:
        size = window_for(opened.config, window)
        tokens = tokens_before_rest(opened.tokenizer, str(data), size, tokens, separator)
    text = load_calibration(opened, str(data), tokens, calibration_tokens, window, separator, other)
    subject = open_subject(opened, data, tokens=tokens, window=window, separator=separator)
    warn(text.notes)
    size = text.ids.shape[1]
    found = find_spectrum(subject, text, folder, wanted, after=0 if other is not None else tokens // size * size)
    warn(notes_on(found.matrices))
    files = [*found.files, *found.draw(folder)]
    if share is not None:
        if share.allocation == "damage":  # again, with what the matrices of each layer do together
            scratch, how = folder / "factors", found.record["method"]
            chosen = corrected_ranks(subject, found.curves, share, how, text, scratch)
            shutil.rmtree(scratch)
        else:
            chosen = share.ranks(found.curves)
        files.append(write_recipe(folder, subject, found, share, chosen, found.record["calibration_text"]))
    return replace(found, files=tuple(files))


def _as_text(ranks: str | float | Sequence[str | float]) -> str:
    """Ranks as a text with commas."""
    return ",".join(map(str, [ranks] if isinstance(ranks, str | int | float) else ranks))


def _share(model: Model, keep: float | None, budget: str | None, allocation: Allocation, damage: bool) -> Share | None:
    """What matrices may cost in all, and how that is shared out; None where no ranks are asked for."""
    if keep is None and budget is None:
        return None
    if keep is not None and budget is not None:
        raise ValueError(f"keep {keep:g} is the same as the budget params={keep:g}x; give one of them")
    if allocation == "damage" and not damage:
        raise ValueError("allocation by damage goes by what is left out here; use energy or uniform, or measure damage")
    if budget is None:
        return Share(RankBudget.keep(keep or 0.0), allocation)
    checkpoint = model.checkpoint
    number_bytes = mode(checkpoint.dtype(name).itemsize for name in checkpoint.names())
    return Share(parse_budget(budget, number_bytes), allocation)
