"""`surgeon check`, `surgeon families`: what would work with a model, or a family, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from surgeon.commands.command import command, keyword, option, several

if TYPE_CHECKING:
    from surgeon.findings.check import Check, FamilyTable
    from surgeon.opened import Model

RANKS = (1, 2, 4, 8)


def _show(
    call: Callable[[], Check],
    as_json: Annotated[bool, option("Print JSON, one object for each answer.", "--json")] = False,
) -> int:
    found = call()
    print(json.dumps(found.to_json(), indent=2) if as_json else found)
    return int(found.refusal is not None)


@command(_show)
def check(
    model: Annotated[
        str | Path | Model,
        option("A folder, a config.json, owner/name[@revision], or demo.", metavar="MODEL"),
    ],
    *,
    ranks: Annotated[
        int | Sequence[int], several("Numbers of ranks to look at. Default: 1,2,4,8.")
    ] = RANKS,
    dtype: Annotated[
        str | None,
        option(
            "What ranks compute in. Default: as the weights are stored.",
            metavar="[float32|bfloat16|float16]",
        ),
    ] = None,
    draft: Annotated[
        str | Path | None,
        option(
            "Whether this can draft for it (--draft of surgeon generate and serve), and on which ranks.",
            metavar="[RECIPE|PROGRAM|VARIANT|FOLDER]",
            kind=str,
        ),
    ] = None,
    output: Annotated[
        str | Path | None, option("Folder for check.csv and check.json.", "--output", "-o")
    ] = None,
) -> Check:
    """Say what would work with a model, what not and why, and how much memory each would take.

    In seconds, of a config.json alone: programs of every operation are put to the code that would refuse them later, on
    the shapes of the model's tensors. Nothing is loaded, and of a hub name the configuration alone is fetched. The exit
    status is 1 where the architecture is not supported, as it is where a file cannot be read.

    Raises:
        FileNotFoundError: if there is no such model, or a file of it is missing.
        ValueError: if a file of it is damaged, it has no architecture, or there is no such dtype.
    """
    from surgeon.commands.capabilities import Capabilities, facts_of, with_shapes
    from surgeon.commands.command import as_several
    from surgeon.findings.check import Check
    from surgeon.models.families import Unsupported
    from surgeon.named import model_name
    from surgeon.opened import Model
    from surgeon.processes.files import make_folder
    from surgeon.runtime.plan.checks import DTYPES
    from surgeon.words import did_you_mean

    numbers = as_several(ranks)
    if (least := min(numbers, default=1)) < 1:
        raise ValueError(f"the number of ranks must be at least 1, not {least}")
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


_FAMILY_RANKS = (1, 2)
# Of the default configuration, what is given beside it: the first that there is a model of counts.
_GIVEN: tuple[dict[str, Any], ...] = (
    {"num_hidden_layers": 6},
    {},
    {"num_hidden_layers": 6, "head_dim": 64},
    {
        "num_hidden_layers": 6,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
    },
)
_EXPERTS = 16


def _show_families(
    call: Callable[[], FamilyTable],
    markdown: Annotated[
        bool, option("Print the page docs/models.md, with the reasons of what does not work.")
    ] = False,
) -> None:
    found = call()
    if markdown:
        print(found.markdown(), end="")
    else:
        print(found)


@command(_show_families)
def families(
    model_types: Annotated[
        Collection[str] | None, keyword("Of the families asked for; by default all.")
    ] = None,
) -> FamilyTable:
    """Say which architectures surgeon knows, and what works with the default configuration of each.

    A row for each family: how many maps of a scan, spaces of a search, and programs on ranks work, the form that LP
    pairs are exported in (either: fused or program, by the layers), and what runs that, and low ranks, on vLLM: itself,
    or surgeon's plugin. Of one model, surgeon check says it, with reasons and memory.
    """
    from surgeon.checkpoint.imported import WRAPPERS
    from surgeon.commands.capabilities import Capabilities
    from surgeon.findings.check import FAMILY_AREAS, FamilyRow, FamilyTable
    from surgeon.models.families import FAMILIES

    chosen = {name: one for name, one in FAMILIES.items() if model_types is None or name in model_types}
    rows = list[FamilyRow]()
    for model_type, family in sorted(chosen.items(), key=lambda item: item[1].name.lower()):
        able = Capabilities(next(_examples(model_type, family.name)), _FAMILY_RANKS, "bfloat16")
        rows.append(
            FamilyRow(family.name, model_type, family.summary, tuple(able.verdicts(FAMILY_AREAS)))
        )
    around = sorted(WRAPPERS.values(), key=lambda wrapper: wrapper.name.lower())
    return FamilyTable(
        rows, {f"{one.name} (`{one.model_type}`)": f"`{one.decoder_type}`" for one in around}
    )


def _examples(model_type: str, name: str) -> Iterator[Model]:
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    from surgeon.checkpoint.random_weights import RandomCheckpoint
    from surgeon.models.families import family_of
    from surgeon.opened import Model

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # some defaults do not go together
    try:
        for given in _GIVEN:
            try:
                config = CONFIG_MAPPING[model_type](**given)
                mixture = family_of(config).mixture  # some defaults are no model
                # How many experts there are changes no answer, only how long it takes.
                if mixture is not None:
                    setattr(config, mixture.count, min(_EXPERTS, getattr(config, mixture.count)))
                yield Model(name, RandomCheckpoint(Path(name), config=config), config)
            except Exception:  # noqa: BLE001 - whatever it trips over, the next one is tried
                continue
    finally:
        logging.set_verbosity(verbosity)
