"""Arguments and options that several commands have in common, with one wording each.

Light, like every module here: typer and the standard library. Use as `data: DataOption` among a command's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from surgeon.named import split_values

if TYPE_CHECKING:
    from surgeon.runtime.comm.quantised import Compression

DEFAULT_TOKENS = 8192  # surgeon.quality.data.DEFAULT_TOKENS, which is not light

DATA_HELP = (
    "Text to measure on: a UTF-8 text file, a .jsonl or .parquet file (as file:column where it is not clear which "
    "column is meant), a folder of such files, a dataset as name[:config[:split[:column]]], or demo (source files of "
    "the Python standard library). What is left out of it, such as rows without text, is said (docs/texts.md)."
)


def _each(values: list[Any] | None) -> list[Any] | None:
    """Every value by itself, of the same type."""
    if not values:
        return values
    found = split_values(map(str, values))
    if not found:
        raise ValueError(f"{','.join(map(str, values))!r} names nothing; give one value or more, with commas between")
    return [type(values[0])(one) for one in found]


def several(*names: str, help: str, metavar: str | None = None) -> Any:
    """An option that takes several values, with commas between or the option again; of the type `list[...]`."""
    return typer.Option(*names, help=f"{help} Several by commas, or the option again.", metavar=metavar, callback=_each)


ModelArgument = Annotated[
    str, typer.Argument(help="A model: a checkpoint folder, a name on the Hugging Face hub, or demo.")
]
DataOption = Annotated[str, typer.Option("--data", help=DATA_HELP)]
DefaultDataOption = Annotated[
    str | None,
    typer.Option(
        "--data", help=DATA_HELP + " Without it demo, which is said, where the model's tokenizer has tokens for that."
    ),
]
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Folder for the results; made if missing.")]
DefaultOutputOption = Annotated[str, typer.Option("--output", "-o", help="Folder for the results; made if missing.")]
TokensOption = Annotated[int, typer.Option("--tokens", help="Tokens to measure on, from the start of the data.")]
WindowOption = Annotated[
    int | None,
    typer.Option("--window", help="Tokens in a window. Default: 512, or the model's positions if it has fewer."),
]
SeparatorOption = Annotated[
    str | None,
    typer.Option(
        "--separator",
        help="Text between the documents of the data, such as '<|endoftext|>': they are kept apart, each begun with "
        "the tokenizer's BOS. Rows of a table or a dataset are documents of their own then.",
    ),
]
BatchesOption = Annotated[
    list[str] | None, several("--batch", help="How many texts are computed together. Default: 1.", metavar="1,8")
]
NewTokensOption = Annotated[int, typer.Option("--new", min=1, help="Tokens to add to each.")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="How often everything is measured.")]
VariantLayersOption = Annotated[
    str | None,
    typer.Option(
        "--layers",
        help="The layers that variants change, e.g. 4:30 (4 to 29). Default: all but the first and last two.",
    ),
]
ProgramOption = Annotated[
    str | None,
    typer.Option("--program", help='Run this program instead of the checkpoint\'s own, e.g. "A0 F0 [A1 A2] [F1 F2]".'),
]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", help="The most memory the process may take, model included, such as 512MB or 2GB."),
]
SampledOption = Annotated[
    bool,
    typer.Option(
        "--sampled-acceptance",
        help="Besides greedy acceptance, measure how often a token that a program draws would be accepted as one of "
        "the original's: sum_v min(p_v, q_v), the mean over tokens.",
    ),
]
ResultsOption = Annotated[
    list[Path] | None,
    several(
        "--results",
        metavar="FOLDER|FILE",
        help="What surgeon eval, bench or search wrote with --output, for the model card.",
    ),
]


# Of what trains.
TrainerArgumentsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--trainer-arg",
        metavar="NAME=VALUE",
        help="An argument of transformers' TrainingArguments, e.g. gradient_checkpointing=true, bf16=true, fsdp=true, "
        "deepspeed=FILE; may be repeated. One that would do nothing is refused.",
    ),
]
FormOption = Annotated[
    Literal["auto", "plain", "fused", "program"], typer.Option("--form", help="As of surgeon export.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint.")]
ProcessDeviceOption = Annotated[
    str, typer.Option("--device", help="cpu, cuda (one GPU for each process), or auto: cuda where there is one.")
]


@dataclass(frozen=True)
class TextArguments:
    """Which part of the data is measured on, and how it is cut; a group of options (see grouped.py)."""

    tokens: TokensOption = DEFAULT_TOKENS
    window: WindowOption = None
    separator: SeparatorOption = None


# Of what runs on ranks: processes here, unlike the ranks of matrices.
def settle_ranks(context: typer.Context, tp: int) -> int:
    """How many ranks a command runs on: all of torchrun's, else as many as --tp says.

    A process of torchrun's whose rank is not 0 does not come back from here: it is that rank until rank 0 ends.

    Raises:
        ValueError: if --tp is given and torchrun has started another number, or its variables make no sense.
        OSError: if rank 0 is not found, or goes.
    """
    from surgeon.processes.torchrun import check_ranks, read_environment

    torchrun = read_environment()
    if torchrun is None:
        return tp
    given = context.get_parameter_source("tp")
    if given is not None and given.name != "DEFAULT":
        check_ranks(torchrun, tp)
    if torchrun.rank:
        from surgeon.runtime.worker.rank import be_rank

        be_rank(torchrun)
    from surgeon.processes.rendezvous import rendezvous_at

    rendezvous_at(torchrun)  # now, so that the others wait for this process, not for a time-out, and end when it does
    return torchrun.ranks


CheckpointArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="A checkpoint folder, edited or not, or a hub name (owner/name@revision).")
]
RanksOption = Annotated[
    int,
    typer.Option(
        "--tp",
        min=1,
        callback=settle_ranks,
        help="How many tensor-parallel ranks to run on, started here. Under torchrun, on one machine or several, all "
        "its processes are the ranks: leave --tp out. They wait 60 seconds for each other, or SURGEON_JOIN_SECONDS.",
    ),
]
RanksDeviceOption = Annotated[
    str, typer.Option("--device", help="cpu, cuda (one GPU per rank), or auto: cuda where there are enough.")
]
CollectivesOption = Annotated[
    str,
    typer.Option(
        "--collectives",
        help="shm (shared memory, CPU ranks of one machine, not under torchrun), gloo, nccl, or auto: the fastest "
        "that fits.",
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="[auto|float32|bfloat16|float16]",
        help="What to compute in; auto: as the weights are stored, but float32 for 16-bit weights on a CPU.",
    ),
]
DecodingOption = Annotated[
    str,
    typer.Option(
        "--decoding",
        metavar="[auto|dynamic|static|captured]",
        help="How passes that add one token to each text are computed: like others (dynamic), in a few fixed shapes "
        "(static), recorded as CUDA graphs (captured), or auto: captured on GPUs where it can be; on a CPU recorded, "
        "too, where the kernels compute all of it.",
    ),
]
LowRankOption = Annotated[
    str,
    typer.Option(
        "--low-rank",
        metavar="[auto|gather|replicate|base]",
        help="How ranks share matrices that are two factors: first factors shared out and gathered in rank space "
        "(gather: DeInfer), whole on every rank (replicate), as measured where they run (auto), or a sum after every "
        "pair of factors (base: what DeInfer is compared with).",
    ),
]
KvOption = Annotated[
    str,
    typer.Option(
        "--kv",
        metavar="[auto|full|lowrank]",
        help="What is cached of attentions whose k and v are two factors each: keys and values (full); what the first "
        "factors give, of which keys and values are made again whenever they are read (lowrank); or auto: full as long "
        "as the cache that is asked for fits into memory so, otherwise lowrank in those attentions where that is fewer "
        "numbers per token on the rank, if more tokens fit then.",
    ),
]
LinkDelayOption = Annotated[
    str | None,
    typer.Option(
        "--link-delay",
        help="Emulate a link between CPU ranks: how long a collective takes at least, e.g. 1ms or 200us.",
    ),
]
LinkBandwidthOption = Annotated[
    str | None,
    typer.Option(
        "--link-bandwidth", help="Emulate a link between CPU ranks: bytes per second that a rank can send, e.g. 1GB."
    ),
]
CompressOption = Annotated[
    str | None,
    typer.Option(
        "--compress",
        metavar="[int8|int4]",
        help="Send the reductions of the program's steps as int8 or int4, which changes results a little.",
    ),
]


@dataclass(frozen=True)
class RunArguments:
    """How a checkpoint runs on ranks, in the user's words; a group of options (see grouped.py)."""

    tp: RanksOption = 1
    program: ProgramOption = None
    device: RanksDeviceOption = "auto"
    dtype: DtypeOption = "auto"
    decoding: DecodingOption = "auto"
    low_rank: LowRankOption = "auto"
    kv: KvOption = "auto"
    collectives: CollectivesOption = "auto"
    link_delay: LinkDelayOption = None
    link_bandwidth: LinkBandwidthOption = None
    compress: CompressOption = None

    def options(self) -> dict[str, Any]:
        """The same as keywords of `surgeon.generate` and `surgeon.serve`.

        Raises:
            ValueError: if they do not fit each other or this machine.
        """
        from surgeon.runtime.comm.link import parse_link
        from surgeon.runtime.worker.options import RankOptions, choose_device

        link = parse_link(self.link_delay, self.link_bandwidth)
        compression = cast("Compression | None", self.compress)  # whether there is such a one, is checked
        ranks = RankOptions(self.tp, choose_device(self.device, self.tp), self.collectives, link, compression)
        ways = {"dtype": self.dtype, "decoding": self.decoding, "low_rank": self.low_rank, "kv": self.kv}
        return {"ranks": ranks, "program": self.program, **ways}


@dataclass(frozen=True)
class ServedRun(RunArguments):
    """The same of a model that works on requests; a group of options (see grouped.py)."""

    halves: Annotated[
        str,
        typer.Option(
            metavar="[on|off]",
            help="Compute passes in two halves, one while the other's reductions are on their way: exact, and faster "
            "for prompts where reductions take long.",
        ),
    ] = "off"

    def options(self) -> dict[str, Any]:
        """As of `RunArguments`."""
        return super().options() | {"halves": self.halves}


@dataclass(frozen=True)
class DraftArguments:
    """What drafts tokens that the model verifies, in the user's words; a group of options (see grouped.py)."""

    draft: Annotated[
        str | None,
        typer.Option(
            metavar="[RECIPE|PROGRAM|VARIANT|lookup|coda]",
            help='Have tokens drafted by another program over the same weights: one such as "A0 F0 [A1 A2] [F1 F2]", '
            "that of a recipe (.yaml), or a variant of the model by its name, such as lp or tracks:4, as surgeon bench "
            "compares them; and verified several at a time by the model: the same greedy tokens, and the same "
            "distribution of drawn ones. It has the model's weights and cache. Or by what came behind the same few "
            "tokens before, in the text itself (lookup), or by the first rack of a checkpoint with codas (coda; "
            "surgeon heal --racks writes them).",
        ),
    ] = None
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many tokens to draft at a time, with --draft. Default: as many as pay by what was measured so "
            "far, none among them.",
        ),
    ] = None


@dataclass(frozen=True)
class PipelineArguments:
    """Ranks with layers of their own, in the user's words; a group of options (see grouped.py)."""

    pipeline: Annotated[
        bool,
        typer.Option(
            "--pipeline",
            help="Have each of --ranks hold a stretch of the layers, in place of a share of every layer: only streams "
            "go from one to the next. While one computes, those before it go on with other texts, or with what the "
            "coda of the checkpoint's first rack drafts (surgeon heal --racks writes codas), which the others "
            "verify: the same texts. For models that do not fit one machine; it was not faster than one rank.",
        ),
    ] = False
    ranks: Annotated[
        int | None, typer.Option(min=1, help="How many ranks --pipeline has; under torchrun all its processes.")
    ] = None

    def over(self, run: RunArguments) -> dict[str, Any]:
        """The keywords of `surgeon.generate` for these and for how a checkpoint runs.

        Raises:
            ValueError: if they do not fit each other.
        """
        if not self.pipeline:
            if self.ranks is not None:
                raise ValueError(
                    "--ranks is of --pipeline, whose ranks have layers of their own; --tp says how many ranks share "
                    "every layer"
                )
            return run.options()
        from surgeon.processes.torchrun import read_environment

        own = read_environment() is None  # --tp is the number of torchrun's processes, else
        ranks = self.ranks if own else self.ranks or run.tp
        if ranks is None:
            raise ValueError("--pipeline needs a number of ranks, each with layers of its own; say --ranks N")
        if own and run.tp != 1:
            raise ValueError(
                f"--tp {run.tp} shares every layer among ranks, and --pipeline gives each rank layers of its own; "
                "leave --tp out"
            )
        return replace(run, tp=ranks).options() | {"pipeline": True}


def parse_counts(name: str, values: list[str] | None, default: Sequence[int]) -> list[int]:
    """The numbers of an option that takes several, each once.

    Raises:
        ValueError: if one is no whole number from 1.
    """
    for one in values or ():
        if not (one.isdecimal() and int(one)):
            raise ValueError(f"{name} {one!r} is no whole number from 1; write numbers such as 1,8")
    return [*dict.fromkeys(map(int, values))] if values else [*default]
