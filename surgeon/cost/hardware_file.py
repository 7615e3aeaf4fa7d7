"""Hardware files, read and written: what is missing, unknown or impossible in one is named with its line."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from surgeon.cost.hardware import Hardware
from surgeon.errors import did_you_mean
from surgeon.language.checked import UNKNOWN, checked
from surgeon.language.yaml import YamlError, read_yaml
from surgeon.named import on_disk

MACHINES = Path(__file__).parent / "machines"
SUFFIX = ".yaml"


def known_hardware() -> list[str]:
    """The names of what is described in files of this package."""
    return sorted(path.stem for path in MACHINES.glob(f"*{SUFFIX}"))


def hardware_of(device: str) -> str | None:
    """The name under which a GPU is described here, by what its driver calls it ("NVIDIA H100 80GB HBM3").

    Returns:
        None if it is not. Of chips that come on cards, too, the names of cards say so (PCIe, NVL); laptops' are others.
    """
    words = {*re.split(r"[^a-z0-9]+", device.lower())}
    for name in known_hardware():
        parts = {*name.split("-")}
        is_card = bool(words & {"pcie", "nvl"})
        if parts - {"sxm"} <= words and not ("sxm" in parts and is_card) and "laptop" not in words:
            return name
    return None


def load_hardware(name_or_path: str | Path) -> Hardware:
    """The hardware of this name, or of this file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if there is no such name, or something in the file is missing, unknown or impossible.
    """
    text = str(name_or_path)
    known = known_hardware()
    path = MACHINES / f"{text}{SUFFIX}" if text in known else on_disk(text)
    if path is None or not path.is_file():
        if "/" in text or Path(text).suffix.lower() == SUFFIX:
            raise FileNotFoundError(f"there is no hardware file {text}; write one, or use {', '.join(known)}")
        raise ValueError(f"there is no hardware {text!r}; {did_you_mean(text, known)} (or give a {SUFFIX} file)")
    try:
        return parse_hardware(path.read_text(encoding="utf-8"))
    except (YamlError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error


def parse_hardware(text: str) -> Hardware:
    """Hardware from the text of a file.

    Raises:
        YamlError: with the line, and what is wrong there.
    """
    document = read_yaml(text)
    value = document.value
    lines = document.lines
    if isinstance(value, dict):
        value.pop("intervals", None)  # of figures in files of 0.2.0
    hardware = checked(Hardware, value, lines, messages=_MESSAGES)
    if not hardware.links and (hardware.devices > 1 or hardware.sharing):
        raise YamlError(lines["links",], "there is no link between the node's ranks; describe one")
    return hardware


def write_hardware(hardware: Hardware) -> str:
    """The text of a file that says this; the inverse of `parse_hardware`, as far as comments do not matter."""
    return yaml.safe_dump(_plain(asdict(hardware)), sort_keys=False, width=120, allow_unicode=True)


def _plain(value: Any) -> Any:
    """Entries of a file for a dataclass's dictionary: figures as numbers or tables, nothing empty but links."""
    if isinstance(value, dict):
        if set(value) == {"points"}:
            points = value["points"]
            table = {int(size) if size == int(size) else size: number for size, number in points}
            if len(points) == 1:
                return points[0][1]
            return table
        return {key: _plain(each) for key, each in value.items() if each not in (None, "", {}) or key == "links"}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


# What a reader of a file is told of a figure that is not there.
_MISSING = {
    "name": "as the command line takes it",
    "devices": "how many of one node",
    "device": "memory, bandwidth, flops and shares",
    "device.memory": "bytes",
    "device.bandwidth": "bytes/s of its memory, at the peak",
    "device.flops": "FLOP/s of dense matrix products by dtype, at the peak",
    "device.shares": "what kernels reach of both peaks",
    "host": "launch, graph, collective, forward and asynchronous",
    "links": "by name, within a node",
}
# What is said of an error, by pydantic's type of it.
_MESSAGES = {
    **dict.fromkeys(UNKNOWN, "there is no entry {key}; {known}"),
    **dict.fromkeys(("dataclass_type", "dict_type", "mapping_type"), "{name} is a mapping, not {value}"),
    **dict.fromkeys(("int_type", "greater_than_equal"), "{name} is a whole number of at least 1, not {value}"),
    "missing": "the figure {name} is missing; add it",
    **{f"missing {name}": f"the figure {name} is missing; add it ({about})" for name, about in _MISSING.items()},
    "number": "{name} is a number of at least 0, not {value}",
    "greater_than": "{name} is a number above 0, not {value}",
    "value_error": "{name}: {problem}",
    "string_type": "{name} is a text, not {value}",
    "bool_type": "it is true or false, not {value}",
    "tuple_type": "it is a list of one or more, not {value}",
    "too_short": "it is a list of one or more, not {value}",
    "too_short device.flops": "it has no dtype; write e.g. flops: {{bfloat16: 989e12}}",
    "said": "{problem}",
}
