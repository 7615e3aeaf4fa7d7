"""A checkpoint that appears under its final name whole, or not at all, and replaces nothing but another one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from surgeon.checkpoint.belongings import CODAS, TEMPLATES
from surgeon.checkpoint.stored import read_json
from surgeon.processes.files import publish, scratch, sync_tree
from surgeon.words import first_few

# What lies in a checkpoint's folder beside the files that surgeon.json lists.
FILES = (
    *(
        "config.json",
        "generation_config.json",
        "surgeon.json",
        "*.safetensors",
        "*.safetensors.index.json",
    ),
    *(
        "tokenizer*",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.*",
        "merges.txt",
        "*.model",
        "*.tiktoken",
    ),
    *(
        "chat_template*",
        "preprocessor_config.json",
        "processor_config.json",
        "modeling_*.py",
        "configuration_*.py",
    ),
    *(
        "tokenization_*.py",
        "pytorch_model*.bin",
        "pytorch_model.bin.index.json",
        "README.md",
        ".gitattributes",
    ),
    *("LICENSE*", "NOTICE*", "USE_POLICY*"),
)
# What lies in folders inside: racks' codas (see codas.py), and chat templates.
FOLDERS = {CODAS: ("codas.json", "rack-*.safetensors"), TEMPLATES: ("*.jinja",)}
MOST_NAMED = 3  # of the things in the way


@contextmanager
def staged(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """Give a new, empty folder beside the target; when the block ends, it becomes the target.

    If the block raises, the folder is removed and the target is as it was.

    Args:
        overwrite: replace an existing checkpoint folder (the old one stays whole until the new one is).
    """
    target = Path.cwd() / target
    check_target(target, overwrite)
    with scratch(target) as folder:
        yield folder
        sync_tree(folder)
        check_target(target, overwrite)  # it may have come into being meanwhile
        publish(folder, target)


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse a target that exists, unless it is empty, or a checkpoint that may be overwritten (`why_kept`)."""
    if not os.path.lexists(target):
        return
    if not target.is_dir() or target.is_symlink():
        raise FileExistsError(f"{target} exists and is not a folder; choose another name")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(
            f"{target} exists and is not empty; choose another name, or pass overwrite"
        )
    reason = why_kept(target)
    if reason is not None:
        raise FileExistsError(
            f"{target} {reason}, so overwrite does not replace it; choose another name, or clear it yourself"
        )


def why_kept(folder: Path) -> str | None:
    """Say why a folder must not be replaced, as the end of a sentence; None if it is a checkpoint and no more.

    A checkpoint has the surgeon.json of an export, or a config.json with a model's type beside safetensors weights.
    """
    report = _object(folder / "surgeon.json")
    config = _object(folder / "config.json")
    exported = all(isinstance(report.get(key), str) for key in ("surgeon", "form", "program"))
    is_model = isinstance(config.get("model_type"), str) and any(folder.glob("*.safetensors"))
    if not exported and not is_model:
        return "is no checkpoint: it has no surgeon.json of an export, and no config.json with a model_type and weights"
    listed = report.get("files") if exported else None
    known = set(listed) if isinstance(listed, dict) else set()
    others = sorted(path.name for path in folder.iterdir() if not _belongs(path, known))
    if others:
        return f"holds what is no part of a checkpoint ({first_few(others, MOST_NAMED)})"
    return None


def _belongs(path: Path, known: set[str]) -> bool:
    """Tell whether a checkpoint has such a file, or folder of nothing else; none has links."""
    if path.is_dir() and not path.is_symlink():
        inside = {
            name.removeprefix(f"{path.name}/") for name in known if name.startswith(f"{path.name}/")
        }
        patterns = FOLDERS.get(path.name, ())
        is_known = bool(inside or patterns)
        return is_known and all(_is_file(one, one.name in inside, patterns) for one in path.iterdir())
    return _is_file(path, path.name in known, FILES)


def _is_file(path: Path, is_known: bool, patterns: Iterable[str]) -> bool:
    is_file = path.is_file() and not path.is_symlink()
    return is_file and (is_known or any(fnmatchcase(path.name, pattern) for pattern in patterns))


def _object(path: Path) -> dict[str, Any]:
    """Read a JSON file's object; empty if there is none."""
    try:
        if path.is_file():
            return read_json(path)
        return {}
    except (OSError, ValueError):
        return {}
