"""What docs/extending.md shows of operations, families, forms and spaces is what there is, and works as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADINGS = {
    "Adding an operation": "language/operations/parallel.py",
    "Adding a family": "models/families/qwen.py",
    "Adding a form": "checkpoint/forms/plain.py",
    "Adding a space": "searches/spaces/fuse.py",
}
FAST = "described or bit_for_bit or padding or maps or recipes or Zeroed or Merges"


def blocks(heading: str) -> list[str]:
    """The Python code under a heading."""
    section = (
        (ROOT / "docs" / "extending.md")
        .read_text()
        .partition(f"\n## {heading}\n")[2]
        .partition("\n## ")[0]
    )
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@pytest.mark.parametrize(("heading", "file"), HEADINGS.items())
def test_code_on_the_page_is_the_codes_own(heading: str, file: str) -> None:
    assert blocks(heading)[0] in (ROOT / "surgeon" / file).read_text()


@pytest.mark.long
@pytest.mark.thorough
def test_the_projects_of_others_can_be_written_as_shown(tmp_path: Path) -> None:
    for number, heading in enumerate(HEADINGS):
        (tmp_path / f"test_{number}.py").write_text(blocks(heading)[1])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", FAST, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) == 35
