"""`surgeon predict`, `surgeon.predict`: costs of programs on hardware that is described."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from surgeon.commands.command import command, option, several
from surgeon.commands.options import COMPARED, Batches, Compress, ProgramText, VariantLayers
from surgeon.words import did_you_mean

if TYPE_CHECKING:
    import pandas as pd

    from surgeon.cost.candidates import SweepCell
    from surgeon.cost.deployment import Deployment
    from surgeon.cost.hardware import Hardware
    from surgeon.findings.speeds import Predictions
    from surgeon.language.program import Program
    from surgeon.opened import EditedModel, Model


def deployment_of(
    ranks: Annotated[int, option("How many tensor-parallel ranks share the model.", least=1)],
    per_node: Annotated[
        int | None, option("Ranks in one node. Default: as many as it has devices.", least=1)
    ] = None,
    link: Annotated[
        str | None, option("Which of the hardware's links connects a node. Default: its first.")
    ] = None,
    network: Annotated[
        str | None, option("Which of the hardware's networks connects nodes. Default: its first.")
    ] = None,
    dtype: Annotated[
        str,
        option(
            "What is computed in; auto: as config.json says, but float32 where kernels are launched one by one.",
            metavar="[auto|float32|bfloat16|float16]",
        ),
    ] = "auto",
    graphs: Annotated[
        bool | None,
        option(
            "Whether decoding passes are captured graphs. Default: on GPUs they are.",
            "--graphs/--no-graphs",
        ),
    ] = None,
    low_rank: Annotated[
        str,
        option(
            "How ranks share matrices that are two factors, as surgeon bench takes it; auto: gather or replicate, "
            "whichever is faster for one token.",
            metavar="[auto|gather|replicate|base]",
        ),
    ] = "auto",
    kv: Annotated[
        str,
        option(
            "What attentions whose k and v are two factors each keep of them.", metavar="[full|lowrank]"
        ),
    ] = "full",
    compress: Compress = None,
    link_delay: Annotated[
        str | None,
        option(
            "A link as surgeon bench emulates it, on top: how long a collective takes at least, e.g. 1ms."
        ),
    ] = None,
    link_bandwidth: Annotated[
        str | None, option("Likewise: bytes per second that a rank can send, e.g. 1GB.")
    ] = None,
) -> Deployment:
    """The spread of a model over hardware."""
    from surgeon.cost.deployment import Deployment
    from surgeon.runtime.comm.collectives import parse_link

    return Deployment(
        ranks=ranks,
        dtype=None if dtype == "auto" else dtype,
        link=link,
        network=network,
        node=per_node,
        graphs=graphs,
        compress=compress,
        low_rank=cast("Any", low_rank),
        kv=cast("Any", kv),
        emulated=parse_link(link_delay, link_bandwidth),
    )


@command()
def predict(
    model: Annotated[
        str | Path | Model | EditedModel,
        option(
            "A config.json or a folder with one, a hub name, a .gguf file, demo, or a recipe (.yaml). "
            "No weights are read.",
            metavar="MODEL",
        ),
    ],
    hardware: Annotated[
        str | Path | Hardware,
        option(
            "What it would run on: a name such as h100-sxm, or a file as surgeon calibrate writes it.",
            "--hardware",
            metavar="NAME|FILE.yaml",
        ),
    ],
    *,
    compare: Annotated[
        str | Path | Program | Sequence[str | Path | Program],
        several("Predict this too, and compare. Another model or recipe, " + COMPARED),
    ] = (),
    layers: VariantLayers = None,
    program: ProgramText = None,
    batch: Batches = 1,
    prompt: Annotated[
        int | None,
        option("Tokens of each prompt. Default: 1024, or half of the model's positions.", least=1),
    ] = None,
    new: Annotated[
        int | None,
        option("Tokens to add to each. Default: 512, or a quarter of the positions.", least=1),
    ] = None,
    ranks: Annotated[
        int | Deployment,
        option(
            "Tensor-parallel ranks that share the model, or all of how it is spread.",
            made_by=deployment_of,
        ),
    ] = 1,
    sweep: Annotated[
        str | Sequence[str] | Mapping[str, Sequence[int]] | None,
        several(
            "Predict all combinations, e.g. ranks=1..64,batch=1..256: from the first to the last, doubling. Of "
            "ranks, batch, prompt, new."
        ),
    ] = None,
    output: Annotated[
        str | Path | None,
        option(
            "Folder for predict.csv, predict.json, predict.png (and drafts.csv, drafts.png with --draft).",
            "--output",
            "-o",
        ),
    ] = None,
    draft: Annotated[
        str | Path | Program | None,
        option(
            "Where it pays that this program over the same weights drafts and the model verifies, as surgeon generate "
            "does it, with the best number of tokens ahead; beside no drafts, and beside the draft alone.",
            metavar="RECIPE|PROGRAM|VARIANT|FOLDER",
        ),
    ] = None,
    acceptance: Annotated[
        float | Sequence[str | float],
        several(
            "With --draft: the chance of a drafted token to be right. Default: 0.8.", kind=list[str]
        ),
    ] = (),
) -> Predictions:
    """Predict what programs cost on hardware that you do not have.

    Nothing runs, and no weights are needed: shapes come from the configuration, what ranks compute and exchange from
    the runtime's own rules, times from the hardware's figures. Every kernel takes as long as what it computes or what
    it moves, every collective as its latency and bandwidth say, and the program is run on clocks, by the executor that
    runs it on ranks: so what is hidden needs no formula.

    First token: until every text has one. Per token: a decoding pass, the mean over the new tokens. Tokens/s: new
    tokens of all texts. Comm.: the time in which ranks wait for collectives, of all the time; hidden: time of
    collectives behind computing. Launch: waiting for the host, or between kernels. Memory: weights, cache and
    activations of the rank that needs most.

    Raises:
        FileNotFoundError: if there is no such model, recipe or hardware file.
        ValueError: if one cannot be read, or a program cannot run so or does not fit into memory; cells of a sweep
            have that in words.
    """
    import pandas as pd

    from surgeon.commands.command import as_list, as_range
    from surgeon.commands.opening import draft_program, name_of
    from surgeon.cost.candidates import explain_memory, open_candidates, prediction_table
    from surgeon.cost.candidates import sweep as predict_all
    from surgeon.cost.deployment import Deployment, Workload
    from surgeon.cost.hardware import Hardware, load_hardware, write_hardware
    from surgeon.cost.predict import read_chances
    from surgeon.errors import refuse_useless
    from surgeon.findings.speeds import Predictions
    from surgeon.named import on_disk
    from surgeon.opened import provenance
    from surgeon.processes.files import make_folder
    from surgeon.progress import progress
    from surgeon.runtime.plan.drafts import named_draft

    if draft is not None and compare:
        raise ValueError("draft does not look at compare; leave one of them out")
    refuse_useless("a draft", draft is not None, acceptance=bool(acceptance))
    chances = read_chances(as_list(acceptance or 0.8))
    stretch = as_range(layers)
    # With a draft these are the draft's.
    candidates = open_candidates(model, as_list(compare), program, stretch if draft is None else None)
    if draft is not None:
        drafts_by = named_draft(str(draft_program(candidates[0].model, draft)))
        _, drafting = open_candidates(candidates[0].model, [drafts_by], layers=stretch)
        if (there := on_disk(str(draft))) is not None:
            drafting = replace(drafting, name=there.stem)
        candidates.append(drafting)
    machine = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    if output is not None:
        make_folder(Path(output))
    deployment = ranks if isinstance(ranks, Deployment) else Deployment(ranks)
    # The default is the dtype of the weights.
    number_type = deployment.dtype or machine.dtype(candidates[0].model.shapes.dtype)
    deployment = replace(deployment, dtype=number_type)
    positions = min(candidate.model.positions for candidate in candidates)
    workload = Workload.within(positions, 1, prompt, new)
    axes = _axes({"batch": batch}) | _axes(sweep or {})
    with progress("predict", len(candidates) * prod(map(len, axes.values())), "predictions") as advance:
        cells = predict_all(candidates, machine, deployment, workload, axes, advance)
        for cell in cells if sweep is None else ():
            if cell.prediction is None:
                # Variants name themselves where they cannot be made.
                name = cell.candidate.name
                about = "" if cell.refused.startswith(name) else f"{name}: "
                raise ValueError(about + cell.refused)
            if cell.refused:
                raise ValueError(explain_memory(cell, machine))
    said: dict[str, Any] = {"heading": _heading(machine, cells), "swept": sweep is not None}
    drafts = pd.DataFrame()
    if draft is not None:
        said["heading"] += f"; drafts of {candidates[1].name}"
        drafts, said["refused"] = _draft_table(cells, machine, chances, sweep is not None)
    name = name_of(model)
    found = Predictions(prediction_table(cells), drafts, cells, record=said | {"model": name})
    if output is None:
        return found
    programs = {
        cell.candidate.name: {
            "program": cell.prediction.plan.program,
            "model": cell.candidate.model.label,
        }
        for cell in reversed(cells)
        if cell.prediction is not None
    }
    settings = said | {
        "deployment": asdict(cells[0].deployment) | {"connected": True},
        "programs": programs,
        "hardware": machine.name,
        "hardware_file": write_hardware(machine),
    }
    record = provenance(name, "", **settings, **candidates[0].model.gguf)
    return replace(found, record=record).save(Path(output))


def _draft_table(
    cells: Sequence[SweepCell], hardware: Hardware, chances: Sequence[float], swept: bool
) -> tuple[pd.DataFrame, list[str]]:
    """Predict where the second of two candidates drafts for the first; in a sweep with the reasons where it cannot."""
    import pandas as pd

    from surgeon.cost.candidates import draft_cells
    from surgeon.findings.speeds import DRAFT_COLUMNS, words_of

    rows = list[dict[str, float]]()
    refused: dict[str, None] = {}
    for plain, alone in zip(cells[::2], cells[1::2], strict=True):
        try:
            rows += draft_cells(plain, alone, hardware, chances)
        except ValueError as error:
            if not swept:
                raise
            there = words_of("ranks", plain.deployment.ranks)
            refused[f"{there}, batch {plain.workload.batch}: {error}"] = None
    return pd.DataFrame(rows, columns=list(DRAFT_COLUMNS)), list(refused)


def _axes(sweep: str | Sequence[str] | Mapping[str, int | Sequence[int]]) -> dict[str, list[int]]:
    """Read the values of each axis to predict for."""
    from surgeon.commands.command import as_list, as_several
    from surgeon.cost.candidates import parse_sweep
    from surgeon.findings.speeds import AXES

    if not isinstance(sweep, Mapping):
        return parse_sweep(",".join(as_list(sweep)))
    axes = {name: [*as_several(values)] for name, values in sweep.items()}
    for name, values in axes.items():
        if name not in AXES:
            raise ValueError(f"there is no {name!r} to sweep; {did_you_mean(name, AXES)}")
        if not values:
            raise ValueError(f"there are no values of {name} to predict for; give at least one")
    return axes


def _heading(hardware: Hardware, cells: Sequence[SweepCell]) -> str:
    """Head predictions with what they have in common."""
    from surgeon.findings.speeds import words_of

    deployments = [cell.deployment for cell in cells]
    loads = [cell.workload for cell in cells]
    common = deployments[0]
    ranks = {one.ranks for one in deployments}
    most = max(ranks)
    words = []
    if len(ranks) == 1:
        words.append(words_of("ranks", most))
    if most > 1:
        words.append(common.link or next(iter(hardware.links), "no link"))
    if most > (common.node or hardware.devices) and hardware.networks:
        words.append(common.network or next(iter(hardware.networks)))
    words += filter(None, [str(common.dtype), common.compress])
    for axis in ("prompt", "new"):
        values = {getattr(one, axis) for one in loads}
        if len(values) == 1:
            words.append(words_of(axis, values.pop()))
    return f"{cells[0].candidate.model.label} on {hardware.name}: {', '.join(words)}"
