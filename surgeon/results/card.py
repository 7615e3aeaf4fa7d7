"""The model card of an exported checkpoint: README.md, made of surgeon.json, the checkpoint itself, and measurements.

A card ends with a comment that holds a hash of what stands above it, so that a card that somebody has changed since is
known as such.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surgeon.checkpoint.belongings import FileKind, kind_of
from surgeon.checkpoint.companions import left_behind, names_in, told_in
from surgeon.checkpoint.describe import Description, describe
from surgeon.checkpoint.inherit import CARD_FILE, Inherited
from surgeon.checkpoint.load import stored_program
from surgeon.checkpoint.ranks import rank_lines
from surgeon.checkpoint.read import DEMO, Checkpoint
from surgeon.language.operations import OPERATIONS
from surgeon.language.operations.applied import AppliedOperation
from surgeon.language.program import Fork, Program, steps_of
from surgeon.language.recipe import operations_in
from surgeon.provenance import write_text
from surgeon.results.card_tables import measured_parts
from surgeon.results.card_text import bullet, code, joined, link, paragraph, table
from surgeon.results.card_training import trained_how, training_section
from surgeon.results.card_usage import usage
from surgeon.results.measured import Identity, Measured
from surgeon.words import plural

_SEAL = re.compile(r"<!-- written by surgeon [\w.+-]+; sha256 of what stands above: ([0-9a-f]{64}) -->\n\Z")
WIDTH = 80  # of a program's lines


def open_edited(folder: Path) -> Description:
    """What is known of a checkpoint that `surgeon export` wrote.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if it is no such checkpoint, or damaged.
    """
    found = describe(folder)
    if found.report is None:
        raise ValueError(f"{folder} has no surgeon.json; cards are for checkpoints that surgeon export has written")
    return found


def identity_of(found: Description, checkpoint: Checkpoint) -> Identity:
    """What measurements of an exported checkpoint must be of; its weights are read."""
    assert found.report is not None
    steps = found.family.steps_per_layer
    program = stored_program(checkpoint) or Program.dense(found.config.num_hidden_layers, steps)
    source_hash = found.report["source"].get("model_hash")
    dense = Program.dense(found.num_layers, steps)
    trained = found.training is not None
    return Identity(found.name, checkpoint.model_hash(), program, source_hash, found.program, dense, trained)


def write_card(folder: Path, name: str, measured: Measured | None = None) -> Inherited:
    """Write the card of the exported checkpoint in a folder; returns what it has from the base model's card.

    Args:
        name: what the card calls the checkpoint.
    """
    found = open_edited(folder)
    inherited = inherited_by(found)
    text = _front(found, name, inherited, measured or Measured())
    text += "\n".join(_body(found, folder, name, inherited, measured or Measured())) + "\n"
    write_text(folder / CARD_FILE, text + _seal(text))
    return inherited


def require_own_card(folder: Path) -> None:
    """Refuse to replace a card that somebody else has written or changed.

    Raises:
        FileExistsError: if the folder has one.
    """
    path = folder / CARD_FILE
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    match = _SEAL.search(text)
    if match is None or match[1] != _digest(text[: match.start()]):
        raise FileExistsError(
            f"{path} was not written by surgeon, or was changed since; keep what you added elsewhere, and pass "
            "--overwrite to replace it"
        )


def inherited_by(found: Description) -> Inherited:
    """What the base model's card said when the checkpoint was exported."""
    return Inherited.from_json((found.report or {}).get("source", {}).get("card"))


def _seal(text: str) -> str:
    from surgeon import __version__

    return f"<!-- written by surgeon {__version__}; sha256 of what stands above: {_digest(text)} -->\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _front(found: Description, name: str, inherited: Inherited, measured: Measured) -> str:
    """The front matter, between its lines of dashes."""
    from huggingface_hub import EvalResult, ModelCardData

    carried = dict(inherited.metadata)
    tags = carried.pop("tags", [])
    tags = [tags] if isinstance(tags, str) else tags
    results = [
        EvalResult(
            task_type="text-generation",
            task_name=score.task,
            dataset_type=score.dataset.partition(":")[0],
            dataset_name=score.dataset,
            dataset_args=None if score.shots is None else {"num_few_shot": score.shots},
            metric_type=score.metric,
            metric_value=score.value,
        )
        for score in measured.scores
        if score.edited and score.dataset is not None and not score.metric.startswith("divergence")
    ]
    data = ModelCardData(
        base_model=found.model if _is_hub_name(found.model) else None,
        library_name="transformers",
        pipeline_tag=carried.pop("pipeline_tag", "text-generation"),
        tags=[*tags, "surgeon"],
        model_name=name if results else None,
        eval_results=results or None,
        **carried,
    )
    return f"---\n{data.to_yaml()}\n---\n\n"


def _body(found: Description, folder: Path, name: str, inherited: Inherited, measured: Measured) -> Iterator[str]:
    """The text, part by part, each ended by a line's end."""
    yield f"# {name}\n"
    yield from _what_was_done(found, name)
    yield from training_section(found.training, name)
    yield from measured_parts(measured, name)
    yield from usage(found, folder, name)
    yield from _proof(found)
    yield from _files(found)
    yield from _licence(found, folder, inherited)


def _what_was_done(found: Description, name: str) -> Iterator[str]:
    report = found.report or {}
    steps, program = found.family.steps_per_layer, found.program
    dense = Program.dense(found.num_layers, steps)
    syncs = [str(each.sync_points(2)) for each in (program, dense)]
    yield paragraph(_what_it_is(found))
    before = report.get("source", {}).get("parameters")
    after = "" if found.weights is None else f"{found.weights.parameters:,}"
    rows = [
        ["layers one after the other (effective depth)", f"{program.effective_depth(steps):g}", str(found.num_layers)],
        ["synchronisations per pass on two tensor-parallel ranks", *syncs],
        ["parameters", after, f"{before:,}" if isinstance(before, int) else ""],
    ]
    yield table(["", name, "its layers in turn" if found.from_scratch else "unedited"], rows)
    yield "## Its program\n" if found.from_scratch else "## What was done\n"
    operations = _operations(report.get("recipe") or (found.training or {}).get("configuration"))
    if operations:
        yield "".join(bullet(f"`{one.to_yaml()}`: {OPERATIONS[one.name].summary}") for one in operations)
    ranges = "; a range such as `4:30` is layers 4 to 29" if operations else ""
    of_whom = "its layers as they were begun" if found.from_scratch else "the layers of the unedited model"
    yield paragraph(f"Layers count from 0{ranges}. The model's program, over {of_whom}:")
    yield code("\n".join(joined(map(str, program.nodes), WIDTH)))
    yield paragraph(_legend(program))
    if ranks := rank_lines(program):
        yield paragraph("The ranks of the matrices that are two factors, by layer:")
        yield "".join(map(bullet, ranks))


def _what_it_is(found: Description) -> str:
    """The first sentence."""
    by, layers = f"surgeon {(found.report or {}).get('surgeon', '')}", plural(found.num_layers, "layer")
    how = trained_how(found.training, found.from_scratch)
    if found.from_scratch:
        return f"This is a {found.family.name} of {layers}, made with {by} and {how}. There is no original behind it."
    return f"This is {_base(found.model)} ({found.family.name}, {layers}) after surgery with {by}, {how}."


def _operations(text: Any) -> tuple[AppliedOperation, ...]:
    """The operations of a recipe or a configuration, if there is one that can be read."""
    try:
        return operations_in(text) if isinstance(text, str) else ()
    except ValueError:
        return ()


def _legend(program: Program) -> str:
    """What the signs mean that occur in the program."""
    steps, sublayers = list(steps_of(program.nodes)), list(program.sublayers())
    signs = {
        "`A4` and `F4` are the attention and the feed-forward of layer 4": True,
        "`[A4 A5]` read the same input, and their outputs are added together": any(len(s.sublayers) > 1 for s in steps),
        "`>A4` reads the stream as it was before the previous step's output was added": any(s.late for s in steps),
        "`{A4 F4 | A5 F5}` are branches that start from the same stream, each with one of its own; at the end what "
        "all of them added is added": any(isinstance(node, Fork) for node in program.nodes),
        "`A4~A5` is one sublayer with the averaged weights of both": any(len(s.layers) > 1 for s in sublayers),
        "`F4@up64,down96` has two factors in place of matrices, of rank 64 for up and 96 for down": any(
            s.ranks for s in sublayers
        ),
        "`A4/2:0` is the first of two slices of the heads (for `F`, of the neurons)": any(s.piece for s in sublayers),
    }
    return "; ".join(text for text, occurs in signs.items() if occurs) + "."


def _proof(found: Description) -> Iterator[str]:
    report = found.report or {}
    proof = report.get("proof")
    if not isinstance(proof, dict):
        return
    yield "## Proof\n"
    beside, holds = "original", "So what is measured of the original under this program holds for these files."
    if found.training is not None:
        beside = "trained model"
        holds = (
            "Their program is that of the recipe, step by step. Their weights are no longer the original's, so what is "
            "measured of the original under this program does not hold for them."
        )
    if found.from_scratch:
        holds = "Their program is the one that was trained, step by step."
    yield paragraph(
        f"Before these files got their name they were loaded and run on {proof['tokens']} random tokens, beside the "
        f"{beside} under the same program. {_differ(proof)} {holds}"
    )
    known = report["source"].get("model_hash")
    named = f"The original has the SHA-256 `{known}` (over its configuration and its weight files). " if known else ""
    yield paragraph(f"{named}`surgeon.json` in this folder holds all of this for machines.")


def _differ(proof: dict[str, Any]) -> str:
    if not proof["exact"] and not proof["written"]:
        return "The logits are equal, number by number."
    stored = f", and by {proof['written']:.2g} as stored in {proof['dtype']}" if proof["dtype"] != "float32" else ""
    return f"The logits differ by {proof['exact']:.2g} of the largest one in float32{stored}."


def _files(found: Description) -> Iterator[str]:
    """What there is to know of the files that lay beside the base model's weights, if there is something."""
    code, left = told_in(found.report or {})
    behind = left_behind(left, _quoted)
    if not code and not behind:
        return
    yield "## Other files\n"
    if code:
        yield paragraph(
            f"{', '.join(map(_quoted, code))}: the base model's own code, which its configuration names. Only who asks "
            "for it (`trust_remote_code=True`) runs it; the proof is of the class that `transformers` has."
        )
    if behind:
        yield paragraph(f"Left behind of what lay beside the base model's weights: {behind}.")


def _quoted(name: str) -> str:
    return f"`{name.replace('`', chr(39))}`"


def _licence(found: Description, folder: Path, inherited: Inherited) -> Iterator[str]:
    yield "## Licence\n"
    if found.from_scratch:
        yield paragraph(
            "It was trained from random weights, so no other model's licence holds for it. Under which terms it may be "
            "used, and what follows from those of the text that it was trained on, is for whoever publishes it to say."
        )
        return
    files = sorted(name for name in names_in(folder) if kind_of(name) is FileKind.TERMS)
    named = inherited.metadata.get("license")
    named_files = ", ".join(map(_quoted, files))
    inside = f" Its {named_files} {'lies' if len(files) == 1 else 'lie'} in this folder." if files else ""
    if named is not None:
        texts = ", ".join(f"`{one}`" for one in ([named] if isinstance(named, str) else named))
        yield paragraph(
            f"The base model's licence holds for this one: {texts}{_licence_name(inherited)}.{inside * bool(files)}"
        )
    elif files:
        yield paragraph(f"The base model's card names no licence that could be read.{inside}")
    else:
        yield paragraph(
            f"The folder of {_base(found.model)} said nothing of a licence when this checkpoint was made: it had no "
            "model card that names one, and no licence file. Find out under which terms it may be used before you "
            "publish or use this one."
        )
    if any(key.startswith("extra_gated") for key in inherited.metadata):
        yield paragraph(
            "The base model's terms have to be accepted on the hub before it is downloaded; this card's metadata asks "
            "for the same."
        )
    if inherited.notes:
        yield paragraph("Not everything in the base model's card could be carried on: " + " ".join(inherited.notes))


def _licence_name(inherited: Inherited) -> str:
    name, target = (str(inherited.metadata.get(key, "")).strip() for key in ("license_name", "license_link"))
    if not name and not target:
        return ""
    return f" ({link(name or 'its text', target) if target else name})"


def _base(model: str | None) -> str:
    if _is_hub_name(model):
        return f"[{model}](https://huggingface.co/{model})"
    return "surgeon's demo model" if model == DEMO else f"`{model}`"


def _is_hub_name(model: str | None) -> bool:
    """Whether it is the name of a model on the hub; of a folder only the last part is kept."""
    return model is not None and "/" in model
