"""The files that belong to a model beside its configuration and weights, and go with it into other checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from surgeon.checkpoint.belongings import CARRIED, FOLDERS, FileKind, kind_of
from surgeon.checkpoint.read import Checkpoint, read_json
from surgeon.words import first_few

AUTO_MAP = "auto_map"  # of a configuration: classes in Python files beside it
_NAMES_CODE = ("tokenizer_config.json", "*processor*.json")  # beside config.json
_REPLACED = "code of the model itself, in whose place this form has its own"
_GONE = "code that a configuration names, and that is not there"
_PARTLY_GONE = "code of which a part is not there"
_EXPECTED = {FileKind.WEIGHTS.value, FileKind.TRAINING.value}  # of what stays behind: nobody misses it
MOST_NAMED = 6  # files, for one reason


@dataclass(frozen=True)
class Companions:
    """What lies in a model's folder beside its configuration and weights, by name, with slashes in folders inside.

    Attributes:
        folder: the model's.
        files: what goes on, and where it lies.
        auto_map: of config.json, the classes whose code is among the files, or in a repository on the hub.
        model_code: those of the files that are only there to build the model itself.
        left: what stays behind, and why.
    """

    folder: Path
    files: dict[str, Path]
    auto_map: dict[str, Any]
    model_code: frozenset[str]
    left: dict[str, str]

    def without_model_code(self) -> Companions:
        """As they go into a checkpoint that has a modeling file of its own; code of the tokenizer stays with it."""
        return replace(
            self,
            files={name: path for name, path in self.files.items() if name not in self.model_code},
            auto_map={name: classes for name, classes in self.auto_map.items() if not _builds_models(name)},
            model_code=frozenset(),
            left=self.left | dict.fromkeys(sorted(self.model_code), _REPLACED),
        )

    def without_tokenizer(self) -> Companions:
        """For a model that is given another tokenizer."""
        kept = {name: path for name, path in self.files.items() if kind_of(name) is not FileKind.TOKENIZER}
        return replace(self, files=kept)

    def over(self, other: Companions) -> Companions:
        """These with those of another folder in the places that they leave; that one is the model's."""
        return replace(
            other,
            files=other.files | self.files,
            auto_map=other.auto_map | self.auto_map,
            model_code=other.model_code | self.model_code,
        )

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(path.stat().st_size for path in self.files.values())

    def copy_to(self, folder: Path) -> None:
        """Write them into a folder, links as the files that they lead to."""
        for name, path in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)

    def to_json(self) -> dict[str, Any]:
        return {"carried": sorted(self.files), "model_code": sorted(self.model_code), "left_behind": self.left}


def companions_of(folder: Path, own: Collection[str]) -> Companions:
    """What lies beside a model's configuration and weights.

    Code is never run. What of it goes on is what a configuration names in its `auto_map`, with the files that those
    import from beside them.

    Args:
        own: names of the files that hold its weights (`Checkpoint.file_names`).

    Raises:
        FileNotFoundError: if what goes on is a link to nothing.
    """
    files: dict[str, Path] = {}
    left: dict[str, str] = {}
    for name in sorted(names_in(folder)):
        kind = kind_of(name)
        if kind in CARRIED and legible(name) == name:  # so that it can be written down as it is
            files[name] = _checked(folder, name)
        elif kind not in (FileKind.MADE_ANEW, FileKind.OF_TOOLS) and name not in own:
            left[legible(name)] = (FileKind.UNKNOWN if kind in CARRIED else kind).value
    # Classes that build a model go together, or not at all; what reads texts is one class at a time.
    auto_map = _auto_map(folder / "config.json")
    of_models = {key: classes for key, classes in auto_map.items() if _builds_models(key)}
    beside = [name for name in files if any(fnmatchcase(name, pattern) for pattern in _NAMES_CODE)]
    of_texts = [{key: classes} for key, classes in auto_map.items() if key not in of_models]
    of_texts += [{"": classes} for name in beside for classes in _auto_map(folder / name).values()]
    kept: dict[str, Any] = {}
    code: list[set[str]] = []
    for group in (of_models, *of_texts):
        needed = {name for classes in group.values() for name in _files_of(folder, classes)}
        gone = {name for name in needed if not (folder / name).is_file()}
        is_whole = not gone and not any(kind_of(name) is FileKind.MADE_ANEW for name in needed)
        left |= dict.fromkeys(sorted(needed - gone), _PARTLY_GONE) | dict.fromkeys(sorted(gone), _GONE) if gone else {}
        kept |= {key: classes for key, classes in group.items() if is_whole and key}
        code.append(needed if is_whole else set())
    for name in sorted(set().union(*code)):
        files[name] = _checked(folder, name)
        left.pop(name, None)
    return Companions(folder, files, kept, frozenset(code[0].difference(*code[1:])), left)


def companions_at(folder: Path) -> Companions:
    """The same of any folder that a model was loaded from, whether or not surgeon could open it.

    Raises:
        FileNotFoundError: as `companions_of`.
    """
    try:
        own = Checkpoint(folder).file_names
    except (FileNotFoundError, ValueError):
        own = frozenset()
    return companions_of(folder, own)


def companions_in(report: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """What a surgeon.json says of the model's own code that went along, and of what was left behind, and why."""
    entry = report.get("companions")
    code, left = (entry.get("model_code"), entry.get("left_behind")) if isinstance(entry, dict) else ([], {})
    left = left if isinstance(left, dict) else {}
    return list(map(str, code)) if isinstance(code, list) else [], {name: str(why) for name, why in left.items()}


def left_behind(left: dict[str, str], shown: Callable[[str], str] = str) -> str:
    """What stays behind that somebody might miss, for people; empty if there is none.

    Args:
        shown: how a name is written.
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in left.items():
        if reason not in _EXPECTED:
            by_reason.setdefault(reason, []).append(shown(name))
    return "; ".join(f"{first_few(names, MOST_NAMED)} ({reason})" for reason, names in by_reason.items())


def legible(name: str) -> str:
    """A file's name as JSON and screens can have it."""
    text = name.encode(errors="backslashreplace").decode()
    if text.isprintable():
        return text
    return ascii(text)[1:-1]


def names_in(folder: Path) -> Iterator[str]:
    """Its files, folders (with a slash), and files of the folders that are looked into."""
    for path in folder.iterdir():
        if not path.is_dir():
            yield path.name
        elif path.name.lower() in FOLDERS:
            yield from (f"{path.name}/{each.name}{'/' * each.is_dir()}" for each in path.iterdir())
        else:
            yield f"{path.name}/"


def _checked(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is a link to {path.resolve()}, which is not there; put the file itself there, or remove the link"
        )
    return path


def _builds_models(key: str) -> bool:
    """Whether an entry of an auto_map names what builds the model, and not what reads texts for it."""
    return key == "AutoConfig" or key.startswith("AutoModel")


def _auto_map(path: Path) -> dict[str, Any]:
    """The auto_map of a configuration; empty if there is none, or none that can be read."""
    try:
        found = read_json(path).get(AUTO_MAP)
    except (FileNotFoundError, ValueError):
        return {}
    if isinstance(found, list):  # as tokenizers of old have it: the slow class, and the fast one
        found = {"AutoTokenizer": found}
    if isinstance(found, dict):
        return found
    return {}


def _files_of(folder: Path, classes: Any) -> Iterator[str]:
    """The files that an entry of an auto_map needs, whether or not they are there.

    Of `repository--module.Class`, which lies elsewhere, and of what is no class's name there are none.
    """
    for one in classes if isinstance(classes, list) else [classes]:
        module = one.partition(".")[0] if isinstance(one, str) else ""
        if not module.isidentifier():
            continue
        yield f"{module}.py"
        try:
            imported = get_relative_import_files(folder / f"{module}.py")
        except FileNotFoundError as missing:
            imported = [str(missing.filename)]
        except UnicodeDecodeError:  # so nothing loads it
            imported = []
        yield from (Path(each).name for each in imported)
