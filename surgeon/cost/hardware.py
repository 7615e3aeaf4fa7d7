"""Hardware as a small file: what its devices, its host and its links can do, every figure with its source beside it.

    name: h100-sxm
    devices: 8                                   # of one node
    device:
      memory: 80e9                               # bytes
      bandwidth: 3.35e12                         # bytes/s, peak
      flops: {bfloat16: 989e12, float32: 67e12}  # FLOP/s of dense matrix products, peak
      shares: {flops: {1: 0.1, 512: 0.7}, bandwidth: 0.8}
    host: {launch: 5e-6, graph: 1e-6, collective: 10e-6, forward: 100e-6, asynchronous: true}
    links:                                       # within a node; the first one is used where none is named
      nvlink: {bandwidth: 450e9, algorithms: [{kind: ring, base: 6.6e-6, hop: 0.6e-6, share: 0.8}]}
    networks: {}                                 # between nodes, likewise

A figure may be a mapping from sizes to numbers, read between its points (`Figure`). Sizes are in bytes, powers of ten;
times in seconds. Types validate files; hardware made in code is not checked again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, GetPydanticSchema, Strict
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

from surgeon.language.yaml import UNKNOWN, YamlError, read_yaml, validate
from surgeon.named import on_disk
from surgeon.words import did_you_mean, show_value

Kind = Literal["ring", "tree", "one-shot", "sharp", "shared-memory"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Figure:
    """A number for every size, by a table in ascending order; one point stands for a constant.

    Between two sizes it is read on a straight line over the logarithm of the size, beyond the ends it stays as it is.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes[0] <= 0 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"a table needs one or more sizes above 0, in ascending order, not {sizes}")

    @classmethod
    def constant(cls, value: float) -> Figure:
        return cls(((1.0, value),))

    def times(self, factor: float) -> Figure:
        return Figure(tuple((size, factor * number) for size, number in self.points))

    def at(self, size: float) -> float:
        sizes = [each for each, _ in self.points]
        place = bisect_left(sizes, size)
        if place == 0:
            return self.points[0][1]
        if place == len(sizes):
            return self.points[-1][1]
        (low, first), (high, second) = self.points[place - 1 : place + 1]
        return first + (second - first) * math.log(size / low) / math.log(high / low)


def _at_least_zero(value: Any) -> float:
    if isinstance(value, str):  # YAML reads 3.35e12 as a text, for want of a sign
        with suppress(ValueError):
            value = float(value)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise PydanticCustomError("number", "a number of at least 0")
    return value


def _kind(value: Any) -> Any:
    if value not in KINDS:
        found = {"value": show_value(value), "known": did_you_mean(str(value), KINDS)}
        raise PydanticCustomError("said", "there is no way {value} of summing; {known}", found)
    return value


def _several(ranks: int) -> int:
    if ranks == 1:
        message = "ranks that share a device are 2 or more; one alone has device.shares and host"
        raise PydanticCustomError("said", message)
    return ranks


def _table(number: Any) -> GetPydanticSchema:
    """Read a figure: one number for every size, or a table."""
    several = BeforeValidator(lambda value: value if isinstance(value, dict) else {1.0: value})
    kind = Annotated[dict[Positive, number], several]
    return GetPydanticSchema(
        lambda _, schema_of: no_info_after_validator_function(
            lambda table: Figure(tuple(table.items())), schema_of(kind)
        )
    )


AtLeastZero = Annotated[float, BeforeValidator(_at_least_zero)]
Positive = Annotated[AtLeastZero, Field(gt=0)]
Count = Annotated[int, Strict(), Field(ge=1)]
Name = Annotated[str, BeforeValidator(str)]
Share = Annotated[Figure, _table(Positive)]
ShareOrAsOthers = Annotated[Figure | None, _table(Positive)]  # None is left out, and not written
Time = Annotated[Figure, _table(AtLeastZero)]


class _Entries:
    """A mapping in a file, without unknown keys."""

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Shares(_Entries):
    """The parts of a device's peaks that kernels reach.

    Attributes:
        flops: of matrix products, by rows (tokens).
        bandwidth: of the memory's bandwidth, by the bytes that a kernel moves.
        attention: of flops in attention's products, by new tokens of a sequence; by default as `flops`.
        cache: of the bandwidth as attention reads its cache, by its bytes; by default as `bandwidth`.
        copies: of the bandwidth in norms, activations and the like, by their bytes, each number read and written once:
            less where the runtime makes several operations of one; by default as `bandwidth`.
    """

    flops: Share
    bandwidth: Share
    attention: ShareOrAsOthers = None
    cache: ShareOrAsOthers = None
    copies: ShareOrAsOthers = None


@dataclass(frozen=True)
class Device(_Entries):
    """One GPU, or the CPU of a machine.

    Attributes:
        memory: bytes.
        bandwidth: bytes/s that its memory moves at its peak.
        flops: FLOP/s of dense matrix products at the peak, by dtype.
        shares: what kernels reach of these.
    """

    memory: Positive
    bandwidth: Positive
    flops: Annotated[Mapping[Name, Positive], Field(min_length=1)]
    shares: Shares

    def peak(self, dtype: str) -> float:
        """FLOP/s in a dtype."""
        if dtype not in self.flops:
            raise ValueError(
                f"the hardware has no figure of FLOP/s in {dtype}; {did_you_mean(dtype, self.flops)}"
            )
        return self.flops[dtype]


@dataclass(frozen=True)
class Host(_Entries):
    """The host's times for keeping a device busy.

    Attributes:
        launch: seconds for a kernel that is launched by itself.
        launches: the same of some kinds, by their name ("norm") or nature ("product") and by rows, where they differ:
            several operations of the runtime may stand behind one kernel.
        graph: seconds between the kernels of a captured graph.
        collective: seconds for starting a collective; inside a captured graph it is `graph`.
        forward: seconds of a pass in which nothing else happens, by texts: scheduling, choosing and handing out tokens.
        asynchronous: whether kernels run while the host launches the next ones (GPUs); otherwise a launch adds to its
            kernel's time (CPUs).
    """

    launch: AtLeastZero
    graph: AtLeastZero
    collective: AtLeastZero
    forward: Time
    asynchronous: Annotated[bool, Strict()]
    launches: Mapping[Name, Time] = field(default_factory=dict)

    def launch_seconds(self, name: str, nature: str, rows: float) -> float:
        figure = self.launches.get(name) or self.launches.get(nature)
        if figure is None:
            return self.launch
        return figure.at(rows)


@dataclass(frozen=True)
class Algorithm(_Entries):
    """One way in which a link's ranks sum or gather, as `surgeon.cost.kernels` has it.

    Attributes:
        kind: ring, tree, one-shot (every rank sends all it has to every other), sharp (the switch sums) or
            shared-memory (ranks write what they have, and read what all wrote: their time, not a link's).
        base: seconds of every collective, whatever is sent, by ranks.
        hop: seconds of each message in a chain, by ranks; for shared-memory, of looking for what another rank wrote.
        share: of the link's bandwidth, by ranks.
    """

    kind: Annotated[Kind, BeforeValidator(_kind)]
    base: Time
    hop: Time
    share: Share


@dataclass(frozen=True)
class Interconnect(_Entries):
    """A connection of devices.

    Attributes:
        bandwidth: bytes/s that one device sends, and at the same time receives, at its peak.
        algorithms: those that can be used; whichever is fastest is.
        contention: which part of the device's speed a collective in flight takes from what computes meanwhile.
    """

    bandwidth: Positive
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)]
    contention: AtLeastZero = 0.0


@dataclass(frozen=True)
class RankShare(_Entries):
    """A rank's share of a device that several ranks share while all compute (processes on a machine's CPU).

    Attributes:
        shares: of the whole device's peaks.
        host: as this rank has it.
    """

    shares: Shares
    host: Host


@dataclass(frozen=True)
class Hardware(_Entries):
    """One machine, or many that are alike.

    Attributes:
        name: as the command line takes it.
        devices: of one node.
        device, host: each of them.
        links: within a node, by name; the first one is used where none is named.
        networks: between nodes, likewise; none if there is only one.
        sharing: a rank's share, by the number of ranks on a device; none if each has a device of its own.
        note: a sentence about it.
    """

    name: str
    devices: Count
    device: Device
    host: Host
    links: Mapping[Name, Interconnect]
    networks: Mapping[Name, Interconnect] = field(default_factory=dict)
    sharing: Mapping[Annotated[Count, AfterValidator(_several)], RankShare] = field(default_factory=dict)
    note: str = ""

    def rank(self, together: int) -> RankShare:
        """The share of one of so many ranks on a device.

        Without figures for that number, those of the next larger one; beyond the largest, ranks take turns.
        """
        if together == 1 or not self.sharing:
            return RankShare(self.device.shares, self.host)
        more = [count for count in self.sharing if count >= together]
        if more:
            return self.sharing[min(more)]
        most = max(self.sharing)
        part = most / together
        times = 1 / part
        shares = self.sharing[most].shares
        host = self.sharing[most].host
        less = {name: figure and figure.times(part) for name, figure in vars(shares).items()}
        slower = replace(
            host,
            launch=times * host.launch,
            graph=times * host.graph,
            collective=times * host.collective,
            forward=host.forward.times(times),
            launches={name: figure.times(times) for name, figure in host.launches.items()},
        )
        return RankShare(Shares(**less), slower)

    def dtype(self, stored: str) -> str:
        """The dtype to compute in: as weights are stored, but float32 where kernels are launched one by one."""
        if self.host.asynchronous:
            return stored
        return "float32"

    def link(self, name: str | None = None, between_nodes: bool = False) -> Interconnect:
        """The link within a node, or the network between nodes, of this name, or the first one."""
        links = self.networks if between_nodes else self.links
        nothing = f"{self.name} has no {'network between nodes' if between_nodes else 'link'}"
        if not links:
            raise ValueError(f"{nothing}; use ranks of one node or a file that describes one")
        if name is None:
            return next(iter(links.values()))
        if name not in links:
            raise ValueError(f"{nothing} {name!r}; {did_you_mean(name, links)}")
        return links[name]


MACHINES = Path(__file__).parent / "machines"
SUFFIX = ".yaml"


def known_hardware() -> list[str]:
    """List the hardware described in files of this package."""
    return sorted(path.stem for path in MACHINES.glob(f"*{SUFFIX}"))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """Load hardware by its name or file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if there is no such name, or an entry of the file is missing, unknown or impossible.
    """
    text = str(name_or_path)
    names = known_hardware()
    path = MACHINES / f"{text}{SUFFIX}" if text in names else on_disk(text)
    if path is None or not path.is_file():
        if "/" in text or Path(text).suffix.lower() == SUFFIX:
            raise FileNotFoundError(
                f"there is no hardware file {text}; write one, or use {', '.join(names)}"
            )
        raise ValueError(
            f"there is no hardware {text!r}; {did_you_mean(text, names)} (or give a {SUFFIX} file)"
        )
    try:
        return parse_hardware(path.read_text(encoding="utf-8"))
    except (YamlError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error


def parse_hardware(text: str) -> Hardware:
    """Parse the text of a hardware file.

    Raises:
        YamlError: with the line, and what is wrong there.
    """
    value, lines = read_yaml(text)
    if isinstance(value, dict):
        value.pop("intervals", None)  # of figures in files of 0.2.0
    hardware = validate(Hardware, value, lines, messages=_MESSAGES)
    if not hardware.links and (hardware.devices > 1 or hardware.sharing):
        raise YamlError(lines["links",], "there is no link between the node's ranks; describe one")
    return hardware


def write_hardware(hardware: Hardware) -> str:
    """Write the text of a hardware file; the inverse of `parse_hardware`, but for comments."""
    return yaml.safe_dump(_plain(asdict(hardware)), sort_keys=False, width=120, allow_unicode=True)


def _plain(value: Any) -> Any:
    """Make entries of a file from a dataclass's dictionary: figures as numbers or tables, nothing empty but links."""
    if isinstance(value, dict):
        if set(value) == {"points"}:
            points = value["points"]
            table = {int(size) if size == int(size) else size: number for size, number in points}
            if len(points) == 1:
                return points[0][1]
            return table
        return {
            key: _plain(each)
            for key, each in value.items()
            if each not in (None, "", {}) or key == "links"
        }
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
    **dict.fromkeys(
        ("int_type", "greater_than_equal"), "{name} is a whole number of at least 1, not {value}"
    ),
    "missing": "the figure {name} is missing; add it",
    **{
        f"missing {name}": f"the figure {name} is missing; add it ({about})"
        for name, about in _MISSING.items()
    },
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
