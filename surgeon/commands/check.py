"""`surgeon check`, `surgeon.check`: what would work with a model, before anything of it is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from surgeon.commands.command import command, option, several

if TYPE_CHECKING:
    from surgeon.findings.check import Check
    from surgeon.opened import Model

RANKS = (1, 2, 4, 8)


def _show(
    call: Callable[[], Check],
    as_json: Annotated[bool, option("Print JSON, one object for each answer.", "--json")] = False,
) -> int:
    found = call()
    print(json.dumps(found.to_json(), indent=2) if as_json else found)
    return int(found.refused is not None)


@command(_show)
def check(
    model: Annotated[
        str | Path | Model,
        option("A folder, a config.json, owner/name[@revision], or demo.", metavar="MODEL", kind=str),
    ],
    *,
    ranks: Annotated[int | Sequence[int], several("Numbers of ranks to look at. Default: 1,2,4,8.")] = RANKS,
    dtype: Annotated[
        str | None,
        option("What ranks compute in. Default: as the weights are stored.", metavar="[float32|bfloat16|float16]"),
    ] = None,
    draft: Annotated[
        str | Path | None,
        option(
            "Whether this can draft for it (--draft of surgeon generate and serve), and on which ranks.",
            metavar="[RECIPE|PROGRAM|VARIANT|FOLDER]",
            kind=str,
        ),
    ] = None,
    output: Annotated[str | Path | None, option("Folder for check.csv and check.json.", "--output", "-o")] = None,
) -> Check:
    """Say what would work with a model, what not and why, and how much memory each would take.

    In seconds, of a config.json alone: programs of every operation are put to the code that would refuse them later, on
    the shapes of the model's tensors. Nothing is loaded, and of a hub name the configuration alone is fetched. The exit
    status is 1 where the architecture is not supported, as it is where a file cannot be read.

    Returns:
        The answers; `refused` says why, where the architecture is not supported.

    Raises:
        FileNotFoundError: if there is no such model, or a file of it is missing.
        ValueError: if a file of it is damaged, it has no architecture, or there is no such dtype.
    """
    from surgeon.commands.capabilities import Capabilities, facts_of, with_shapes
    from surgeon.commands.opening import check_counts
    from surgeon.errors import did_you_mean
    from surgeon.findings.check import Check
    from surgeon.models.families import Unsupported
    from surgeon.named import model_name
    from surgeon.opened import Model
    from surgeon.processes.files import make_folder
    from surgeon.runtime.plan.checks import DTYPES

    numbers = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    check_counts(**{"the number of ranks": min(numbers, default=1)})
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"there is no dtype {dtype!r} to compute in; {did_you_mean(dtype, DTYPES)}")
    name = model.name if isinstance(model, Model) else model_name(model)
    try:
        opened = with_shapes(model)
        able = Capabilities(opened, numbers, dtype or str(opened.dtype).removeprefix("torch."), draft)
        found = Check.of(able.verdicts(), model=name, facts=facts_of(opened))
    except Unsupported as refusal:
        found = Check.of([], model=name, refused=str(refusal))
    if output is None:
        return found
    make_folder(Path(output))
    return found.save(Path(output))
