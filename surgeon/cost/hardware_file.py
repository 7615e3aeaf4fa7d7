"""Hardware files, read and written: what is missing, unknown or impossible in one is named with its line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from surgeon.cost.figure import Figure
from surgeon.cost.hardware import KINDS, Algorithm, Device, Hardware, Host, Interconnect, RankShare, Shares
from surgeon.errors import did_you_mean, shown
from surgeon.language.yaml import YamlError, read_yaml
from surgeon.named import on_disk

MACHINES = Path(__file__).parent / "machines"
SUFFIX = ".yaml"


def known_hardware() -> list[str]:
    """The names of what is described in files of this package."""
    return sorted(path.stem for path in MACHINES.glob(f"*{SUFFIX}"))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """The hardware of this name, or of this file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if there is no such name, or something in the file is missing, unknown or impossible.
    """
    text, known = str(name_or_path), known_hardware()
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
    reader = _Reader(document.lines)
    return reader.hardware(document.value)


def write_hardware(hardware: Hardware) -> str:
    """The text of a file that says this; the inverse of `parse_hardware`, as far as comments do not matter."""
    return yaml.safe_dump(_plain(asdict(hardware)), sort_keys=False, width=120, allow_unicode=True)


def _plain(value: Any) -> Any:
    """What a file has in place of a dataclass's dictionary: figures as numbers or tables, and nothing empty."""
    if isinstance(value, dict):
        if set(value) == {"points"}:
            points = value["points"]
            return points[0][1] if len(points) == 1 else {_key(size): number for size, number in points}
        return {key: _plain(each) for key, each in value.items() if each not in (None, "", {})}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _key(size: float) -> float | int:
    return int(size) if size == int(size) else size


# What a reader of a file is told of a figure that is not there.
_ABOUT = {
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

Path_ = tuple[Any, ...]


class _Reader:
    """Checks and converts, by the lines on which entries stand."""

    def __init__(self, lines: Mapping[Path_, int]) -> None:
        self.lines = lines

    def hardware(self, value: Any) -> Hardware:
        needed = ("name", "devices", "device", "host", "links")
        found = self.entries(value, (), needed, ("networks", "sharing", "note", "intervals"))
        hardware = Hardware(
            name=self.text(found["name"], ("name",)),
            devices=self.count(found["devices"], ("devices",)),
            device=self.device(found["device"], ("device",)),
            host=self.host(found["host"], ("host",)),
            links=self.links(found["links"], ("links",)),
            networks=self.links(found.get("networks", {}), ("networks",)),
            sharing=self.sharing(found.get("sharing", {}), ("sharing",)),
            note=self.text(found.get("note", ""), ("note",)),
            intervals=self.intervals(found.get("intervals", {}), value),
        )
        if not hardware.links and (hardware.devices > 1 or hardware.sharing):
            raise self.wrong(("links",), "there is no link between the node's ranks; describe one")
        return hardware

    def device(self, value: Any, path: Path_) -> Device:
        found = self.entries(value, path, ("memory", "bandwidth", "flops", "shares"))
        flops = self.mapping(found["flops"], (*path, "flops"))
        if not flops:
            raise self.wrong((*path, "flops"), "it has no dtype; write e.g. flops: {bfloat16: 989e12}")
        return Device(
            memory=self.positive(found["memory"], (*path, "memory")),
            bandwidth=self.positive(found["bandwidth"], (*path, "bandwidth")),
            flops={str(dtype): self.positive(each, (*path, "flops", dtype)) for dtype, each in flops.items()},
            shares=self.shares(found["shares"], (*path, "shares")),
        )

    def shares(self, value: Any, path: Path_) -> Shares:
        found = self.entries(value, path, ("flops", "bandwidth"), ("attention", "cache", "copies"))
        return Shares(**{key: self.figure(each, (*path, key), self.positive) for key, each in found.items()})

    def host(self, value: Any, path: Path_) -> Host:
        figures = ("launch", "graph", "collective")
        found = self.entries(value, path, (*figures, "forward", "asynchronous"), ("launches",))
        if not isinstance(found["asynchronous"], bool):
            raise self.wrong((*path, "asynchronous"), f"it is true or false, not {shown(found['asynchronous'])}")
        seconds = {key: self.at_least_zero(found[key], (*path, key)) for key in figures}
        launches = self.mapping(found.get("launches", {}), (*path, "launches"))
        return Host(
            **seconds,
            forward=self.figure(found["forward"], (*path, "forward"), self.at_least_zero),
            asynchronous=found["asynchronous"],
            launches={
                str(name): self.figure(each, (*path, "launches", name), self.at_least_zero)
                for name, each in launches.items()
            },
        )

    def links(self, value: Any, path: Path_) -> dict[str, Interconnect]:
        return {str(key): self.link(each, (*path, key)) for key, each in self.mapping(value, path).items()}

    def link(self, value: Any, path: Path_) -> Interconnect:
        found = self.entries(value, path, ("bandwidth", "algorithms"), ("contention",))
        algorithms = found["algorithms"]
        if not isinstance(algorithms, list) or not algorithms:
            raise self.wrong((*path, "algorithms"), f"it is a list of one or more, not {shown(algorithms)}")
        return Interconnect(
            bandwidth=self.positive(found["bandwidth"], (*path, "bandwidth")),
            algorithms=tuple(
                self.algorithm(each, (*path, "algorithms", place)) for place, each in enumerate(algorithms)
            ),
            contention=self.at_least_zero(found.get("contention", 0.0), (*path, "contention")),
        )

    def algorithm(self, value: Any, path: Path_) -> Algorithm:
        found = self.entries(value, path, ("kind", "base", "hop", "share"))
        kind = next((each for each in KINDS if each == found["kind"]), None)
        if kind is None:
            known = did_you_mean(str(found["kind"]), KINDS)
            raise self.wrong((*path, "kind"), f"there is no way {shown(found['kind'])} of summing; {known}")
        return Algorithm(
            kind=kind,
            base=self.figure(found["base"], (*path, "base"), self.at_least_zero),
            hop=self.figure(found["hop"], (*path, "hop"), self.at_least_zero),
            share=self.figure(found["share"], (*path, "share"), self.positive),
        )

    def sharing(self, value: Any, path: Path_) -> dict[int, RankShare]:
        found = {}
        for ranks, each in self.mapping(value, path).items():
            at = (*path, ranks)
            if self.count(ranks, at) < 2:
                raise self.wrong(at, "ranks that share a device are 2 or more; one alone has device.shares and host")
            entries = self.entries(each, at, ("shares", "host"))
            shares, host = self.shares(entries["shares"], (*at, "shares")), self.host(entries["host"], (*at, "host"))
            found[ranks] = RankShare(shares, host)
        return found

    def intervals(self, value: Any, document: Any) -> dict[str, tuple[float, float]]:
        found = {}
        for name, bounds in self.mapping(value, ("intervals",)).items():
            path = ("intervals", name)
            if not _is_figure(document, str(name).split(".")):
                raise self.wrong(path, f"there is no figure {shown(name)} in this file")
            if not isinstance(bounds, list) or len(bounds) != 2:
                raise self.wrong(path, f"an interval is [low, high], not {shown(bounds)}")
            low, high = (self.at_least_zero(each, (*path, place)) for place, each in enumerate(bounds))
            if low > high:
                raise self.wrong(path, f"an interval is [low, high], not {shown(bounds)}")
            found[str(name)] = (low, high)
        return found

    def entries(self, value: Any, path: Path_, needed: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Any]:
        """A mapping that has all of these keys, perhaps some of the others, and nothing else."""
        found, needed = self.mapping(value, path), tuple(needed)
        known = (*needed, *optional)
        for key in found:
            if key not in known:
                raise self.wrong((*path, key), f"there is no entry {shown(key)}; {did_you_mean(str(key), known)}")
        for key in needed:
            if key not in found:
                name = ".".join(map(str, (*path, key)))
                about = f" ({_ABOUT[name]})" if name in _ABOUT else ""
                raise self.wrong(path, f"the figure {name} is missing; add it{about}")
        return found

    def mapping(self, value: Any, path: Path_) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise self.wrong(path, f"{_name(path)} is a mapping, not {shown(value)}")
        return value

    def figure(self, value: Any, path: Path_, number: Callable[[Any, Path_], float]) -> Figure:
        if not isinstance(value, dict):
            return Figure.constant(number(value, path))
        points = [(self.positive(size, (*path, size)), number(each, (*path, size))) for size, each in value.items()]
        try:
            return Figure(tuple(points))
        except ValueError as error:
            raise self.wrong(path, f"{_name(path)}: {error}") from error

    def text(self, value: Any, path: Path_) -> str:
        if not isinstance(value, str):
            raise self.wrong(path, f"{_name(path)} is a text, not {shown(value)}")
        return value

    def count(self, value: Any, path: Path_) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(path, f"{_name(path)} is a whole number of at least 1, not {shown(value)}")
        return value

    def positive(self, value: Any, path: Path_) -> float:
        number = self.at_least_zero(value, path)
        if number == 0:
            raise self.wrong(path, f"{_name(path)} is a number above 0, not {shown(value)}")
        return number

    def at_least_zero(self, value: Any, path: Path_) -> float:
        number = _number(value)
        if number is None or not 0 <= number < math.inf:
            raise self.wrong(path, f"{_name(path)} is a number of at least 0, not {shown(value)}")
        return number

    def wrong(self, path: Path_, problem: str) -> YamlError:
        """What to raise about an entry; of one that is not there, with the line of what it would stand in."""
        while path not in self.lines:
            path = path[:-1]
        return YamlError(self.lines[path], problem)


def _number(value: Any) -> float | None:
    """A number; YAML reads 3.35e12 as a text, for want of a sign."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _name(path: Path_) -> str:
    return ".".join(map(str, path)) or "the document"


def _is_figure(document: Any, keys: list[str]) -> bool:
    """Whether a number stands at the end of these keys and indices."""
    for key in keys:
        if isinstance(document, list):
            document = document[int(key)] if key.isdecimal() and int(key) < len(document) else None
        elif isinstance(document, dict):
            document = next((each for name, each in document.items() if str(name) == key), None)
        else:
            return False
    return _number(document) is not None
