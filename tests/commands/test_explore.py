"""`surgeon explore` as a user meets it, before anything is measured."""

from __future__ import annotations

from pathlib import Path

from tests.commands.conftest import Run


def test_it_is_the_first_command_and_begins_with_a_text(
    surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    _, out, _ = surgeon_says("--help")
    first = out.partition("Commands:")[2].split()[0]
    assert first == "explore"
    code, out, err = surgeon_says(first, tiny_checkpoint, "-o", tmp_path / "out")
    assert (code, out) == (1, "")
    assert err.startswith(
        f"error: no text was given to explore {tiny_checkpoint} on; give one of the kind"
    )
    assert not (tmp_path / "out").exists()
