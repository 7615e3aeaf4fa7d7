"""`surgeon spectrum`: the singular values of a model's matrices, and what cutting them down to lower ranks does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.opening import open_measured, warn
from surgeon.cli.options import DataOption, ModelArgument, OutputOption, TextArguments

if TYPE_CHECKING:
    from pathlib import Path

    from surgeon.analysis.factors.allocation import Ranks
    from surgeon.analysis.factors.rank_recipe import Share
    from surgeon.analysis.spectrum import Spectrum, SpectrumRequest
    from surgeon.analysis.subject import Subject
    from surgeon.language.operations.lowrank import Calibration
    from surgeon.quality.data import Windows


@dataclass(frozen=True)
class MatrixArguments:
    """Which matrices, and what is done to them, in the user's words; a group of options (see grouped.py)."""

    layers: Annotated[
        str | None,
        typer.Option(help="Only these layers; 4:30 is layers 4 to 29. Default: all.", show_default=False),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            help="Only these matrices, such as q,k or gate,up,down (also v and o). Default: all that the model has.",
            show_default=False,
        ),
    ] = None
    ranks: Annotated[
        str,
        typer.Option(
            help="Ranks to cut each matrix down to: shares of its full rank (1/8 or 0.125), or whole numbers."
        ),
    ] = "1/8,1/4,1/2,3/4"
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

    def request(self, model: str) -> SpectrumRequest:
        """The same, checked against a model, whose configuration is read, and no weights.

        Raises:
            ValueError: if the model has no such layers or matrices, or something is no rank.
        """
        from surgeon.analysis.factors.matrices import parse_ranks, parse_weights
        from surgeon.analysis.spectrum import request
        from surgeon.checkpoint.load import read_config
        from surgeon.checkpoint.read import Checkpoint, locate
        from surgeon.language.recipe import parse_range

        return request(
            read_config(Checkpoint(locate(model))),
            layers=None if self.layers is None else parse_range(self.layers),
            weights=None if self.weights is None else parse_weights(self.weights),
            ranks=() if self.no_damage else parse_ranks(self.ranks),
            method=self.method,
        )


@dataclass(frozen=True)
class ShareArguments:
    """Ranks under a budget, in the user's words; a group of options (see grouped.py)."""

    keep: Annotated[
        float | None,
        typer.Option(
            help="Also write recipe.yaml: a rank for each matrix, so that they keep this share of their parameters in "
            "all (0.6, say).",
            show_default=False,
        ),
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(
            help="The same with another limit than --keep: params=3M, weight_bytes=20MB, or wire_bytes=40KB, what one "
            "token's reductions and gatherings send in all layers; or times as much as whole matrices, as "
            "wire_bytes=0.5x. Numbers count as large as the checkpoint's.",
            show_default=False,
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

    def share(self, model: str, no_damage: bool) -> Share | None:
        """The same, checked; None where no ranks are asked for.

        Raises:
            ValueError: if the budget makes no sense, or goes by damage that is not to be measured.
        """
        from surgeon.analysis.factors.rank_recipe import RankBudget, Share, parse_budget

        if self.keep is None and self.budget is None:
            return None
        if self.keep is not None and self.budget is not None:
            raise ValueError(f"--keep {self.keep:g} is the same as --budget params={self.keep:g}x; give one of them")
        if self.allocation == "damage" and no_damage:
            raise ValueError(
                "--allocation damage goes by what --no-damage leaves out; use --allocation energy or uniform"
            )
        if self.budget is None:
            return Share(RankBudget.keep(self.keep or 0.0), self.allocation)
        return Share(parse_budget(self.budget, _number_bytes(model)), self.allocation)


def _number_bytes(model: str) -> int:
    """How large most of a checkpoint's numbers are."""
    from statistics import mode

    from surgeon.checkpoint.read import Checkpoint, locate

    checkpoint = Checkpoint(locate(model))
    return mode(checkpoint.dtype(name).itemsize for name in checkpoint.names())


@dataclass(frozen=True)
class CalibrationArguments:
    """The text that whitens, in the user's words; a group of options (see grouped.py)."""

    calibration: Annotated[
        str | None,
        typer.Option(
            help="Text whose activations whiten, as for --data. Default: what follows the measured tokens in --data.",
            show_default=False,
        ),
    ] = None
    calibration_tokens: Annotated[
        int,
        typer.Option(help="Tokens of it. More whiten better; they should be many times a matrix's input features."),
    ] = 32768

    def load(self, model: str, data: str, text: TextArguments) -> Windows:
        """The text as windows of tokens, cut as the measured text is.

        Raises:
            FileNotFoundError, ValueError: as `load_calibration`.
        """
        from surgeon.analysis.factors.calibration import load_calibration

        wanted = self.calibration_tokens
        return load_calibration(model, data, text.tokens, wanted, text.window, text.separator, self.calibration)

    def recorded(self, loaded: Windows, measured: int) -> Calibration:
        """How a recipe names that text; `measured` tokens come before it where it is no text of its own."""
        from surgeon.analysis.factors.calibration import recorded

        size = loaded.ids.shape[1]
        return recorded(loaded, after=0 if self.calibration is not None else measured // size * size)


@grouped
def spectrum(
    model: ModelArgument,
    data: DataOption,
    output: OutputOption,
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
    from surgeon.analysis.factors.rank_recipe import write_recipe
    from surgeon.analysis.spectrum import spectrum as find_spectrum
    from surgeon.analysis.spectrum_tables import notes_on
    from surgeon.reports.spectrum import draw_spectrum

    wanted = matrices.request(model)  # what is wrong with it is said before a large model is loaded
    share = ranks.share(model, matrices.no_damage)
    calibration = whitening.load(model, data, text)
    subject = open_measured(model, data, text)
    warn(calibration.notes)
    recorded = whitening.recorded(calibration, text.tokens)
    record = subject.provenance(**calibration.record("calibration"), calibration_tokens=calibration.ids.numel())
    found = find_spectrum(
        subject.model,
        subject.windows,
        calibration,
        output,
        wanted,
        model_hash=subject.model_hash,
        record=record,
    )
    warn(notes_on(found.matrices))
    pictures = draw_spectrum(found, wanted.ranks, output, subject.label)
    _say(found, wanted, subject)
    files = [*found.files, *pictures]
    if share is not None:
        chosen = _ranks(share, subject, found, calibration, output / "factors")
        files.append(write_recipe(output, subject, found, share, chosen, recorded))
    for path in files:
        typer.echo(str(path))


def _ranks(share: Share, subject: Subject, found: Spectrum, calibration: Windows, folder: Path) -> Ranks:
    """A rank for each matrix; by damage, after a second look at what layers' matrices do together."""
    import shutil

    from surgeon.analysis.factors.corrections import corrected_ranks

    if share.allocation != "damage":
        return share.ranks(found.curves)
    method, windows = found.record["method"], subject.windows
    ranks = corrected_ranks(
        subject.model, found.curves, share, method, windows, calibration, folder, subject.model_hash
    )
    shutil.rmtree(folder)
    return ranks


def _say(found: Spectrum, wanted: SpectrumRequest, subject: Subject) -> None:
    """Print what was measured."""
    from surgeon.reports.spectrum import print_spectrum

    base = found.record["base_perplexity"]
    typer.echo(f"base perplexity {base:.4g} over {subject.windows.predicted:,} predicted tokens\n")
    print_spectrum(found, wanted.ranks)
