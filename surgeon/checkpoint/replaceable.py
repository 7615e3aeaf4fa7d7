"""Which folders an export may replace: checkpoints, and nothing that has become something else as well."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from surgeon.checkpoint.belongings import TEMPLATES
from surgeon.checkpoint.read import read_json

# What lies in a checkpoint's folder beside the files that surgeon.json lists.
FILES = (
    *("config.json", "generation_config.json", "surgeon.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template*", "preprocessor_config.json", "processor_config.json", "modeling_*.py", "configuration_*.py"),
    *("tokenization_*.py", "pytorch_model*.bin", "pytorch_model.bin.index.json", "README.md", ".gitattributes"),
    *("LICENSE*", "NOTICE*", "USE_POLICY*"),
)
CODAS = "codas"
# What lies in folders inside: racks' codas (see codas.py), and chat templates.
FOLDERS = {CODAS: ("codas.json", "rack-*.safetensors"), TEMPLATES: ("*.jinja",)}
MOST_NAMED = 3  # of the things in the way


def why_kept(folder: Path) -> str | None:
    """Why a folder must not be replaced, as the end of a sentence about it; nothing if it is a checkpoint and no more.

    It is one if it has the surgeon.json of an export, or a config.json with a model's type beside safetensors weights.
    """
    report, config = _object(folder / "surgeon.json"), _object(folder / "config.json")
    exported = all(isinstance(report.get(key), str) for key in ("surgeon", "form", "program"))
    is_model = isinstance(config.get("model_type"), str) and any(folder.glob("*.safetensors"))
    if not exported and not is_model:
        return "is no checkpoint: it has no surgeon.json of an export, and no config.json with a model_type and weights"
    listed = report.get("files") if exported else None
    known = set(listed) if isinstance(listed, dict) else set()
    others = sorted(path.name for path in folder.iterdir() if not _belongs(path, known))
    if not others:
        return None
    more = "" if len(others) <= MOST_NAMED else f" and {len(others) - MOST_NAMED} more"
    return f"holds what is no part of a checkpoint ({', '.join(others[:MOST_NAMED])}{more})"


def _belongs(path: Path, known: set[str]) -> bool:
    """Whether it is what a checkpoint has: some files, and folders of nothing else; no checkpoint has links."""
    if path.is_dir() and not path.is_symlink():
        inside = {name.removeprefix(f"{path.name}/") for name in known if name.startswith(f"{path.name}/")}
        patterns = FOLDERS.get(path.name, ())
        is_known = bool(inside or patterns)
        return is_known and all(_is_file(one, one.name in inside, patterns) for one in path.iterdir())
    return _is_file(path, path.name in known, FILES)


def _is_file(path: Path, is_known: bool, patterns: Iterable[str]) -> bool:
    is_file = path.is_file() and not path.is_symlink()
    return is_file and (is_known or any(fnmatchcase(path.name, pattern) for pattern in patterns))


def _object(path: Path) -> dict[str, Any]:
    """A JSON file's object; empty if there is none."""
    try:
        return read_json(path) if path.is_file() else {}
    except (OSError, ValueError):
        return {}
