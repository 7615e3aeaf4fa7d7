"""`surgeon export`: write what a recipe describes as a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from surgeon.cli.options import ResultsOption


def export(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML): a model and the operations on it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
    form: Annotated[
        Literal["auto", "plain", "fused", "program"],
        typer.Option(
            help="plain: an ordinary checkpoint of whole layers. fused: layers side by side stored as one wide layer "
            "(transformers and vLLM, with a small modeling file inside). program: anything else (transformers, "
            "likewise; vLLM, too, where it is low-rank only). auto: the first of these that is exact."
        ),
    ] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Store weights in this dtype, not in the original's."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub name, instead of the recipe's model.")] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace an existing checkpoint: a folder with the surgeon.json of an export, or with a model's "
            "config.json and safetensors weights. One that holds anything else too (folders, files of yours) is kept.",
        ),
    ] = False,
    results: ResultsOption = None,
    factors: Annotated[
        Path | None,
        typer.Option(
            help="Folder for factors that the recipe has calibrated on a text: made there, and kept. Default: one "
            "beside the output, which is removed once the checkpoint is written."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="The most memory that making such factors may take, model included, such as 512MB or 2GB."),
    ] = None,
) -> None:
    """Write the recipe's model as a checkpoint that other software loads.

    The checkpoint is proven before it gets its name: run on random tokens, it gives the same logits as the original
    run with the recipe's program. surgeon.json inside says what was done and proven, and README.md, a model card, says
    it to people. Prints the folder's name.

    Tokenizer, chat templates, processors, generation settings and licence go along, and code that the model's
    configuration names: the tokenizer's in all forms, the model's own in the plain form. Other weights and what belongs
    to training do not; whatever else stays behind is named.

    A recipe that names the weights it was made for (weights: sha256:...), as those of surgeon search do, is refused for
    a model with others. Given one with --model, it is applied with a warning.

    Where the recipe has lowrank with a method other than plain, factors are made first, layer by layer, on the text
    that it names. Interrupted, the same command goes on where it was.
    """
    from surgeon.library.export import export as write
    from surgeon.memory import share_heaps

    share_heaps()
    found = write(
        recipe,
        output,
        original=model,
        form=form,
        dtype=dtype,
        overwrite=overwrite,
        results=results or (),
        factors=factors,
        memory=memory,
        planned=lambda layout: print(f"{layout.form} form: {layout.reason}.", file=sys.stderr),
    )
    print(found, file=sys.stderr)
    print(output)
