"""Running what the pages show: which blocks, on what, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.docs import blocks, run
from scripts.docs.blocks import Block

PAGE = """\
# A page

```bash
echo $((6 * 7)) files of MODEL; ls MODEL/config.json; test -e text.txt
```

```text
43 files of MODEL
MODEL/config.json
```

1. In a list:

   ```python
   print("nothing is shown of this")
   ```

<!-- not run: it takes a day -->
```bash
exit 1
```

```sh
surgeon serve MODEL    # only read
```

    surgeon generate MODEL \\
        --tp 2
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(blocks, "PROJECT", tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    return "page.md"


def test_blocks_of_a_page(page: str) -> None:
    found = blocks.blocks(page)
    assert [(block.line, block.language) for block in found] == [
        (4, "bash"), (8, "text"), (15, "python"), (20, "bash"), (24, "sh"), (27, ""),
    ]  # fmt: skip
    assert found[2].code == 'print("nothing is shown of this")\n'
    assert found[3].not_run == "it takes a day"
    assert run.to_run(page) == [found[0], found[2]]
    assert list(blocks.commands(found[4].code + found[5].code)) == [
        ["surgeon", "serve", "MODEL"], ["surgeon", "generate", "MODEL", "--tp", "2"],
    ]  # fmt: skip


def test_a_page_runs_in_a_folder_that_has_what_it_names(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    assert run.run_page(page, tmp_path / "run", 60)
    said = capsys.readouterr().out
    assert said.count("  ok, ") == 2
    assert "43 is 42 now" not in said, "they are within 5%"


def test_what_is_printed_is_compared() -> None:
    assert run.compare("depth 12,  8.1e-07 off\n", "depth 12, 8e-07 off") == []
    assert run.compare("perplexity 6.9 of 2,044", "perplexity 6.4 of 2,044") == ["6.4 is 6.9 now"]
    with pytest.raises(ValueError, match="prints something else"):
        run.compare("depth 12", "deep 12")


@pytest.mark.parametrize(
    ("code", "seconds", "why"),
    [("echo no >&2\nfalse\necho on", 60, "ended with 1\nno"), ("sleep 9", 0.1, "took longer")],
)
def test_what_fails_is_said(code: str, seconds: float, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why):
        run.run(Block("page.md", 1, "bash", code), tmp_path, seconds)
