"""`surgeon families`, `surgeon.families`: the architectures that surgeon knows, and what each can do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from surgeon.commands.command import command, keyword, option

if TYPE_CHECKING:
    from surgeon.findings.check import FamilyTable
    from surgeon.opened import Model

RANKS = (1, 2)
# Of the default configuration, what is given beside it: the first that there is a model of counts.
_GIVEN: tuple[dict[str, Any], ...] = (
    {"num_hidden_layers": 6},
    {},
    {"num_hidden_layers": 6, "head_dim": 64},
    {"num_hidden_layers": 6, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2},
)
_EXPERTS = 16


def _show(
    call: Callable[[], FamilyTable],
    markdown: Annotated[bool, option("Print the page docs/models.md, with the reasons of what does not work.")] = False,
) -> None:
    found = call()
    if markdown:
        print(found.markdown(), end="")
    else:
        print(found)


@command(_show)
def families(
    model_types: Annotated[Collection[str] | None, keyword("Of the families asked for; by default all.")] = None,
) -> FamilyTable:
    """Say which architectures surgeon knows, and what works with the default configuration of each.

    A row for each family: how many maps of a scan, spaces of a search, and programs on ranks work, the form that LP
    pairs are exported in (either: fused or program, by the layers), and what runs that, and low ranks, on vLLM: itself,
    or surgeon's plugin. Of one model, surgeon check says it, with reasons and memory.
    """
    from surgeon.commands.capabilities import Capabilities
    from surgeon.findings.check import FAMILY_AREAS, FamilyRow, FamilyTable
    from surgeon.models.families import FAMILIES
    from surgeon.models.wrappers import WRAPPERS

    chosen = {name: one for name, one in FAMILIES.items() if model_types is None or name in model_types}
    rows = list[FamilyRow]()
    for model_type, family in sorted(chosen.items(), key=lambda item: item[1].name.lower()):
        able = Capabilities(next(_examples(model_type, family.name)), RANKS, "bfloat16")
        rows.append(FamilyRow(family.name, model_type, family.summary, tuple(able.verdicts(FAMILY_AREAS))))
    around = sorted(WRAPPERS.values(), key=lambda wrapper: wrapper.name.lower())
    return FamilyTable(rows, {f"{one.name} (`{one.model_type}`)": f"`{one.decoder_type}`" for one in around})


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
                if mixture is not None:  # how many experts there are changes no answer, only how long it takes
                    setattr(config, mixture.count, min(_EXPERTS, getattr(config, mixture.count)))
                yield Model(name, RandomCheckpoint(Path(name), config=config), config)
            except Exception:  # noqa: BLE001 - whatever it trips over, the next one is tried
                continue
    finally:
        logging.set_verbosity(verbosity)
