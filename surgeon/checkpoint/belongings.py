"""Files beside a model's configuration and weights: which go on into checkpoints made of it, and its card's metadata.

Names count without regard to case (`license.txt` is as good as `LICENSE`), with slashes in folders inside. Damaged or
odd entries of a card are left out with a note: it is written by hand, and no reason for an export to fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from surgeon.checkpoint.stored import REPORT_FILE, Checkpoint
from surgeon.language.yaml import read_yaml
from surgeon.words import first_few, first_line, show_value

GENERATION = "generation_config.json"
# The GGUF file that a folder was made of (name, SHA-256, types), and the folder's files.
GGUF_RECORD = "gguf.json"
CODAS = "codas"  # where racks' codas lie (see codas.py)
TEMPLATES = "additional_chat_templates"  # where transformers puts all chat templates but the default one


class FileKind(Enum):
    """Kinds of files; of those that stay behind, the value says why."""

    TOKENIZER = "of the tokenizer"
    SETTINGS = "settings"
    TERMS = "terms of use"
    CODE = "code that reads no texts or images"
    WEIGHTS = "other weights"
    TRAINING = "of training"
    CODAS = "of these weights alone"
    MADE_ANEW = "made anew"
    OF_TOOLS = "of other tools"
    UNKNOWN = "not known to belong to a model"


CARRIED = {
    FileKind.TOKENIZER: (
        "*tokenizer*",
        "special_tokens_map.json",
        "added_tokens.json",
        "*vocab*",
        "merges.txt",
        "*.model",
        "*.spm",
        "*.tiktoken",
        "tekken.json",
        "chat_template*",
        "*.jinja",
        f"{TEMPLATES}/*.jinja",
    ),
    # Of Mistral's models SYSTEM_PROMPT.txt is a part of the documented prompt.
    FileKind.SETTINGS: (GENERATION, "*processor*.json", "*system_prompt*"),
    FileKind.TERMS: (
        "*license*",
        "*licence*",
        "*notice*",
        "*use_policy*",
        "*use-policy*",
        "copying*",
        "copyright*",
        "licenses/*",
        "licences/*",
    ),
}
# Which are looked into.
FOLDERS = {
    pattern.partition("/")[0] for patterns in CARRIED.values() for pattern in patterns if "/" in pattern
}

# What is weights, or code, is no tokenizer, whatever else its name says; but for code that reads texts and images.
_CODE = {FileKind.TOKENIZER: ("tokenization_*.py",), FileKind.SETTINGS: ("*processing_*.py",)}
_LEFT = {
    FileKind.OF_TOOLS: (".*", "__pycache__/"),
    FileKind.MADE_ANEW: ("config.json", "readme.md", REPORT_FILE, GGUF_RECORD, "modeling_surgeon_*.py"),
    FileKind.CODAS: (f"{CODAS}/",),
    FileKind.TRAINING: (
        "optimizer*",
        "scheduler*",
        "scaler.pt",
        "rng_state*",
        "training_args*",
        "trainer_state.json",
        "latest",
        "*_results.json",
        "events.out.tfevents*",
        "zero_to_fp32.py",
        "checkpoint-*/",
        "global_step*/",
        "runs/",
        "logs/",
        "wandb/",
        "training.json",
    ),
    FileKind.WEIGHTS: (
        "*.safetensors",
        "*.index.json",
        "*.bin",
        "*.pt",
        "*.pth",
        "*.ckpt",
        "*.pkl",
        "*.pickle",
        "*.gguf",
        "*.ggml",
        "*.onnx",
        "*.onnx_data",
        "*.h5",
        "*.msgpack",
        "*.npz",
        "*.npy",
        "*.ot",
        "*.tflite",
        "*.mlmodel",
        "*.nemo",
        "params.json",
        "original/",
        "onnx/",
        "openvino/",
        "coreml/",
        "gguf/",
    ),
    FileKind.CODE: ("*.py", "*.pyc", "*.so", "*.sh", "*.ipynb"),
}


def kind_of(name: str) -> FileKind:
    """Classify a file, or a folder, whose name ends in a slash."""
    lower = name.lower()
    last = lower if lower.endswith("/") else lower.rpartition("/")[2]
    for kind, patterns in (*_CODE.items(), *_LEFT.items()):
        if any(fnmatchcase(last, pattern) for pattern in patterns):
            return kind
    for kind, patterns in CARRIED.items():
        if any(
            fnmatchcase(lower, pattern) and pattern.count("/") == lower.count("/")
            for pattern in patterns
        ):
            return kind
    return FileKind.UNKNOWN


# Patterns of carried files for libraries that regard case.
PATTERNS_FOR_THE_HUB = [
    re.sub("[a-z]", lambda letter: f"[{letter[0].upper()}{letter[0]}]", pattern)
    for patterns in CARRIED.values()
    for pattern in patterns
]
_EXPECTED = {FileKind.WEIGHTS.value, FileKind.TRAINING.value}  # of what stays behind: nobody misses it
MOST_NAMED = 6  # files, for one reason


@dataclass(frozen=True)
class Companions:
    """Files beside a model's configuration and weights, by name, with slashes in folders inside.

    Attributes:
        folder: the model's.
        files: those carried on, and where they lie.
        left: those that stay behind, and why.
    """

    folder: Path
    files: dict[str, Path]
    left: dict[str, str]


def companions_of(folder: Path, own: Collection[str] | None = None) -> Companions:
    """Find the files beside a model's configuration and weights; a carried link to nothing raises FileNotFoundError.

    Code is never run. Code of tokenizers and processors goes on, by its name.

    Args:
        own: names of the files that hold its weights, by default those of a `Checkpoint`, if surgeon can open it.
    """
    if own is None:
        own = ()
        with suppress(FileNotFoundError, ValueError):
            own = Checkpoint(folder).file_names
    files: dict[str, Path] = {}
    left: dict[str, str] = {}
    for name in sorted(names_in(folder)):
        kind = kind_of(name)
        if kind in CARRIED and legible(name) == name:  # so that it can be written down as it is
            files[name] = path = folder / name
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is a link to {path.resolve()}, which is not there; put the file itself there, or remove "
                    "the link"
                )
        elif kind not in (FileKind.MADE_ANEW, FileKind.OF_TOOLS) and name not in own:
            left[legible(name)] = (FileKind.UNKNOWN if kind in CARRIED else kind).value
    return Companions(folder, files, left)


def left_by(report: dict[str, Any]) -> dict[str, str]:
    """Return the files left behind by a surgeon.json, and why."""
    entry = report.get("companions")
    left = entry.get("left_behind") if isinstance(entry, dict) else None
    if isinstance(left, dict):
        return {name: str(why) for name, why in left.items()}
    return {}


def left_behind(left: dict[str, str], shown: Callable[[str], str] = str) -> str:
    """Say which files stay behind that somebody might miss; empty if there are none.

    Args:
        shown: how a name is written.
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in left.items():
        if reason not in _EXPECTED:
            by_reason.setdefault(reason, []).append(shown(name))
    return "; ".join(f"{first_few(names, MOST_NAMED)} ({reason})" for reason, names in by_reason.items())


def legible(name: str) -> str:
    """Write a file's name so that JSON and screens can have it."""
    text = name.encode(errors="backslashreplace").decode()
    if text.isprintable():
        return text
    return ascii(text)[1:-1]


def names_in(folder: Path) -> Iterator[str]:
    """Yield its files, folders (with a slash), and files of `FOLDERS`."""
    for path in folder.iterdir():
        if not path.is_dir():
            yield path.name
        elif path.name.lower() in FOLDERS:
            yield from (f"{path.name}/{each.name}{'/' * each.is_dir()}" for each in path.iterdir())
        else:
            yield f"{path.name}/"


CARD_FILE = "README.md"
LARGEST_CARD = 1 << 20  # bytes; what is larger is no card
TEXTS = ("license", "license_name", "license_link", "pipeline_tag")
LISTS = ("license", "language", "datasets", "tags")  # a text, or several
MOST_VALUES = 1000  # that terms can consist of
TERMS = "extra_gated_"  # what the hub's keys for terms to be accepted begin with
_FRONT_MATTER = re.compile(r"\s*^---$(.*?)^---[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Inherited:
    """Metadata carried on from a base model's card: licence, languages, terms.

    Attributes:
        metadata: entries of a card's front matter.
        notes: what was left out and why, a sentence each.
    """

    metadata: dict[str, Any]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"metadata": self.metadata, "notes": list(self.notes)}

    @classmethod
    def from_json(cls, kept: Any) -> Inherited:
        kept = kept if isinstance(kept, dict) else {}
        metadata = kept.get("metadata")
        notes = kept.get("notes")
        return cls(
            metadata if isinstance(metadata, dict) else {},
            tuple(notes) if isinstance(notes, list) else (),
        )


def inherit(folder: Path) -> Inherited:
    """Read the card of the model in a folder, if there is one."""
    path = folder / CARD_FILE
    if not path.is_file():
        return Inherited({})
    try:
        if path.stat().st_size > LARGEST_CARD:
            raise ValueError(f"the file has more than {LARGEST_CARD:,} bytes")
        match = _FRONT_MATTER.match(path.read_text(encoding="utf-8-sig"))
        front = read_yaml(match[1])[0] if match else None
        if not isinstance(front, dict | None):
            raise ValueError("it is no mapping")
    except (OSError, ValueError) as error:
        return Inherited(
            {}, (f"The front matter of its {CARD_FILE} cannot be read ({first_line(error)}).",)
        )
    metadata: dict[str, Any] = {}
    notes = []
    for key, value in (front or {}).items():
        is_carried = isinstance(key, str) and (key in (*TEXTS, *LISTS) or key.startswith(TERMS))
        if not is_carried or value is None:
            continue
        if _is_valid(key, value):
            metadata[key] = value
        else:
            notes.append(
                f"Its {CARD_FILE} has {key}: {show_value(value)}, which is not what belongs there."
            )
    return Inherited(metadata, tuple(notes))


def _is_valid(key: str, value: Any) -> bool:
    if key.startswith(TERMS):  # a few texts and numbers, nested in any way
        left = [value]
        seen = 0
        while left:
            one = left.pop()
            seen += 1
            if seen > MOST_VALUES or not (isinstance(one, dict | list | int) or _is_text(one)):
                return False
            if isinstance(one, dict | list):
                left += list(one)[:MOST_VALUES]
            if isinstance(one, dict):
                left += list(one.values())[:MOST_VALUES]
        return True
    if isinstance(value, list) and key in LISTS:
        return bool(value) and all(map(_is_text, value))
    return _is_text(value)


def _is_text(value: Any) -> bool:
    """Tell whether it is a text of characters that a file can hold."""
    return (
        isinstance(value, str)
        and bool(value.strip())
        and value.encode(errors="ignore").decode() == value
    )
