"""Options of several commands, each declared once: used as `data: Data`, in groups as `**text: Unpack[TextFlags]`.

A command passes a group on whole: a further key is an option of all of its commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import typer

from surgeon.commands.command import option, several
from surgeon.language.operations.base import VARIANTS, describe_name
from surgeon.quality import DEFAULT_TOKENS as DEFAULT_TOKENS
from surgeon.runtime.comm.wires import WIRES
from surgeon.words import join_words

if TYPE_CHECKING:
    from surgeon.language.program import Program
    from surgeon.opened import EditedModel, Model
    from surgeon.runtime.worker.rank import RankOptions


DATA_HELP = (
    "Text to measure on: a UTF-8 text file, a .jsonl or .parquet file (file:column, where several have text), a folder "
    "of such files, a dataset as name[:config[:split[:column]]], or demo (source files of Python's standard library). "
    "Rows without text are left out, which is said (docs/texts.md)."
)
COMPARED = (
    'a program such as "A0 F0 [A1 A2] [F1 F2]", or a variant of the model: dense, '
    + ", ".join(describe_name(name, variant.note) for name, variant in VARIANTS.items())
    + ", halves (itself, computed in two halves, one while the other's reductions are on their way), upper-bound "
    "(ranks that never wait for each other: wrong results, and the best time there can be)."
)

ModelName = Annotated[
    "str | Path | Model",
    option(
        "A model: a checkpoint folder, a name on the Hugging Face hub, a .gguf file, or demo.",
        metavar="MODEL",
    ),
]
Data = Annotated["str | Path", option(DATA_HELP, "--data", kind=str)]
DefaultData = Annotated[
    "str | Path | None",
    option(
        DATA_HELP + " Without it demo, which is said, where the model's tokenizer has tokens for that.",
        kind=str,
    ),
]
Output = Annotated[
    "str | Path", option("Folder for the results; made if missing.", "--output", "-o", kind=str)
]
Window = Annotated[
    int | None, option("Tokens in a window. Default: 512, or the model's positions if it has fewer.")
]
Separator = Annotated[
    str | None,
    option(
        "Text between the documents of the data, such as '<|endoftext|>': they are kept apart, each begun with the "
        "tokenizer's BOS. Rows of a table or a dataset are documents of their own then."
    ),
]
Memory = Annotated[
    int | str | None,
    option(
        "The most memory the process may take, model included, such as 512MB or 2GB (1 MB is 10^6 bytes)."
    ),
]
SampledAcceptance = Annotated[
    bool,
    option(
        "Besides greedy acceptance, measure how often a token that a program draws would be accepted as one of the "
        "original's: sum_v min(p_v, q_v), the mean over tokens.",
        default=False,
    ),
]
ProgramText = Annotated[
    "Program | str | None",
    option(
        'Run this program instead of the checkpoint\'s own, e.g. "A0 F0 [A1 A2] [F1 F2]".',
    ),
]
VariantLayers = Annotated[
    "range | str | None",
    option(
        "The layers that variants change, e.g. 4:30 (4 to 29). Default: all but the first and last two."
    ),
]
Results = Annotated[
    "str | Path | Sequence[str | Path]",
    several(
        "What surgeon eval or search wrote with --output, for the model card.", metavar="FOLDER|FILE"
    ),
]
Batches = Annotated[
    "int | Sequence[int]",
    several("How many texts are computed together. Default: 1.", metavar="1,8"),
]
CacheMemory = Annotated[
    int | str | None,
    option(
        "Memory for weights and cache, such as 512MB or 2GB: of all ranks together on a CPU, of each GPU. Default: "
        "most of what is free.",
    ),
]

System = Annotated[
    str | None,
    option(
        "A system message, before all others in the chat template; a template that takes none is refused."
    ),
]
Rounds = Annotated[int, option("How often everything is measured.", least=1)]

# Of what trains.
TrainerArguments = Annotated[
    "Mapping[str, Any] | Sequence[str] | None",
    option(
        "An argument of transformers' TrainingArguments, e.g. gradient_checkpointing=true, bf16=true, fsdp=true, "
        "deepspeed=FILE; may be repeated. One that would do nothing is refused.",
        "--trainer-arg",
        metavar="NAME=VALUE",
    ),
]
Form = Annotated[Literal["auto", "plain", "fused", "program"], option("As of surgeon export.")]
Overwrite = Annotated[bool, option("Replace an existing checkpoint.")]
ProcessDevice = Annotated[
    str, option("cpu, cuda (one GPU for each process), or auto: cuda where there is one.")
]

# Of what runs on ranks: processes here, unlike the ranks of matrices.
Checkpoint = Annotated[
    "str | Path | Model",
    option(
        "A checkpoint folder, edited or not, a hub name (owner/name@revision), or a .gguf file.",
        metavar="DIR",
    ),
]
RanksDevice = Annotated[
    str, option("cpu, cuda (one GPU per rank), or auto: cuda where there are enough.")
]
Dtype = Annotated[
    str,
    option(
        "What to compute in; auto: as the weights are stored, but float32 for 16-bit weights on a CPU.",
        metavar="[auto|float32|bfloat16|float16]",
        default="auto",
    ),
]
Compress = Annotated[
    str | None,
    option(
        f"Send the reductions of the program's steps as {join_words(list(WIRES), 'or')}, which changes results a "
        "little.",
        metavar=f"[{'|'.join(WIRES)}]",
    ),
]


def _settle_ranks(context: typer.Context, tp: int) -> int:
    """The number of ranks: all of torchrun's, else that of --tp.

    A process of torchrun's of another rank than 0 is that rank here until rank 0 ends, and never returns.
    """
    from surgeon.processes.torchrun import check_ranks, read_environment

    torchrun = read_environment()
    if torchrun is None:
        return tp
    source = context.get_parameter_source("tp")
    if source is not None and source.name != "DEFAULT":
        check_ranks(torchrun, tp)
    if torchrun.rank:
        from surgeon.runtime.worker.rank import be_rank

        be_rank(torchrun)
    from surgeon.processes.rendezvous import rendezvous_at

    # Now, so that the others wait for this process, not for a time-out, and end when it does.
    rendezvous_at(torchrun)
    return torchrun.ranks


def ranks_of(
    tp: Annotated[
        int,
        option(
            "How many tensor-parallel ranks to run on, started here. Under torchrun, on one machine or several, all "
            "its processes are the ranks: leave --tp out. They wait 60 seconds for each other, or "
            "SURGEON_JOIN_SECONDS.",
            least=1,
            callback=_settle_ranks,
        ),
    ],
    device: RanksDevice = "auto",
    collectives: Annotated[
        str,
        option(
            "shm (shared memory, CPU ranks of one machine, not under torchrun), gloo, nccl, or auto: the fastest that "
            "fits; of surgeon bench also none: see upper-bound."
        ),
    ] = "auto",
    link_delay: Annotated[
        str | None,
        option(
            "Emulate a link between CPU ranks: how long a collective takes at least, e.g. 1ms or 200us."
        ),
    ] = None,
    link_bandwidth: Annotated[
        str | None,
        option("Emulate a link between CPU ranks: bytes per second that a rank can send, e.g. 1GB."),
    ] = None,
    compress: Compress = None,
) -> RankOptions:
    """The ranks that a command line asks for."""
    from surgeon.runtime.comm.collectives import parse_link
    from surgeon.runtime.worker.rank import RankOptions, choose_device

    return RankOptions(
        tp, choose_device(device, tp), collectives, parse_link(link_delay, link_bandwidth), compress
    )


Ranks = Annotated[
    "int | RankOptions",
    option(
        "How many, on GPUs where there is one for each, or what they are in full.",
        made_by=ranks_of,
        default=1,
    ),
]


class TextFlags(TypedDict, total=False):
    """A text to measure on."""

    tokens: Annotated[
        int, option("Tokens to measure on, from the start of the data.", default=DEFAULT_TOKENS)
    ]
    window: Window
    separator: Separator


class MeasuringFlags(TextFlags, total=False):
    """A text, and a limit of memory."""

    memory: Memory


class WayFlags(TypedDict, total=False):
    """Options of ranks that compute a program."""

    dtype: Dtype
    decoding: Annotated[
        str,
        option(
            "How passes that add one token to each text are computed: like others (dynamic), in a few fixed shapes "
            "(static), or auto: on GPUs in fixed shapes, recorded as CUDA graphs where that can be; on a CPU recorded, "
            "too, where the kernels compute all of it.",
            metavar="[auto|dynamic|static]",
            default="auto",
        ),
    ]
    low_rank: Annotated[
        str,
        option(
            "How ranks share matrices that are two factors: first factors shared out and gathered in rank space "
            "(gather: DeInfer), whole on every rank (replicate), as measured where they run (auto), or a sum after "
            "every pair of factors (base: what DeInfer is compared with).",
            metavar="[auto|gather|replicate|base]",
            default="auto",
        ),
    ]
    kv: Annotated[
        str,
        option(
            "What is cached of attentions whose k and v are two factors each: keys and values (full); what the first "
            "factors give, of which these are made again at every read (lowrank); or auto: full as long as the cache "
            "fits into memory, otherwise lowrank where that is fewer numbers per token, if more tokens fit then.",
            metavar="[auto|full|lowrank]",
            default="auto",
        ),
    ]


class ServiceFlags(WayFlags, total=False):
    """Options of ranks that answer requests."""

    draft: Annotated[
        str | Path | Program | EditedModel | None,
        option(
            "Have tokens drafted, and verified several at a time by the model: the same greedy tokens, and the same "
            'distribution of drawn ones. By a program on its weights and cache, such as "A0 F0 [A1 A2] [F1 F2]", that '
            "of a recipe (.yaml), or a variant by its name, such as lp or tracks:4, as surgeon bench compares them; by "
            "what came behind the same few tokens before, in the text itself (lookup); or by the first rack of a "
            "checkpoint with codas (coda; surgeon heal --racks writes them).",
            metavar="[RECIPE|PROGRAM|VARIANT|lookup|coda]",
        ),
    ]
    draft_tokens: Annotated[
        int | None,
        option(
            "How many tokens to draft at a time, with --draft. Default: as many as pay by what was measured so far.",
            least=1,
        ),
    ]
    ranks: Ranks
    program: ProgramText
    halves: Annotated[
        str,
        option(
            "Compute passes in two halves, one while the other's reductions are on their way: exact, and faster for "
            "prompts where reductions take long.",
            metavar="[on|off]",
            default="off",
        ),
    ]


class SamplingFlags(TypedDict, total=False):
    """Options of sampling."""

    temperature: Annotated[
        float,
        option(
            "0 takes the most likely token each time (greedy); the higher, the more often unlikely ones.",
            default=0.0,
        ),
    ]
    top_p: Annotated[
        float,
        option(
            "Draw among the fewest most likely tokens that have this probability together; 0 is greedy.",
            default=1.0,
        ),
    ]
    top_k: Annotated[int, option("Draw among this many of the most likely tokens; 0 is all.", default=0)]
    min_p: Annotated[
        float,
        option("Draw among tokens at least this times as likely as the most likely one.", default=0.0),
    ]
    repetition_penalty: Annotated[
        float | None,
        option(
            "Above 1, tokens of prompt and text so far become less likely. Default: the checkpoint's own "
            "(generation_config.json), or 1, which is none."
        ),
    ]
    seed: Annotated[
        int | None,
        option(
            "The same seed draws the same texts again, for any --tp and --max-batch: each prompt has random numbers of "
            "its own, by the seed and its place among the prompts. Default: another seed each time."
        ),
    ]
    stop: Annotated[
        Sequence[str],
        option("A text that ends what is written, and is no part of it; may be repeated.", default=()),
    ]


class WritingFlags(SamplingFlags, ServiceFlags, total=False):
    """Options of generation on ranks."""


def flags_in(group: type[Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Take those flags that a group has."""
    return {name: value for name, value in flags.items() if name in group.__annotations__}
