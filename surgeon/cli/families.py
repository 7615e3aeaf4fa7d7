"""`surgeon families`: the architectures that surgeon knows, and what each can do."""

from __future__ import annotations

from typing import Annotated

import typer


def families(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/models.md, with the reasons of what does not work.")
    ] = False,
) -> None:
    """Say which architectures surgeon knows, and what works with the default configuration of each.

    A row for each family: how many maps of a scan, spaces of a search, and programs on ranks work, the form that LP
    pairs are exported in (either: fused or program, by the layers), and what runs that, and low ranks, on vLLM: itself,
    or surgeon's plugin. Of one model, surgeon check says it, with reasons and memory.
    """
    from surgeon.library.families import families as known_families

    found = known_families()
    typer.echo(found.markdown() if markdown else str(found), nl=not markdown)
