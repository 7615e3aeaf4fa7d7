"""`surgeon show`: a checkpoint or a recipe in words and as a picture, or the differences of two."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from surgeon.commands.command import command, option
from surgeon.words import WIDTH, first_few, plural

if TYPE_CHECKING:
    from surgeon.checkpoint.describe import Surgery

LABEL = 12  # columns
_LONGEST_VALUE = 40  # characters of a value of config.json
_NAMED = 12  # tensors that a line names


@command(lambda call: call())
def show(
    what: Annotated[
        str,
        option(
            "A checkpoint folder, a hub name, a .gguf file, demo, or a recipe (YAML).",
            metavar="DIR|RECIPE",
        ),
    ],
    other: Annotated[
        str | None, option("A second one: say in what the two differ.", metavar="[OTHER]", argument=True)
    ] = None,
    output: Annotated[
        Path | None, option("Draw the program too, as a PNG file under this name.", "--output", "-o")
    ] = None,
    verify: Annotated[
        bool,
        option("Read all files of an exported checkpoint, and say which are not as they were written."),
    ] = False,
) -> None:
    """Say what a checkpoint or a recipe is: its model, its program, what that costs, and how it was proven.

    No weights are read, except by --verify. With -o, the residual stream is drawn with the steps that read it and add
    to it, so that what was changed is seen at a glance. Programs are over the layers of the unedited model; the ranks
    of matrices that are two factors stand on lines of their own, those of equal layers once.

    With OTHER, only what differs is said, of the first as A and of the second as B. Checkpoints are compared in
    config.json, tokenizer, chat templates, settings, licence and code, too, and tensors bit for bit, by the layer of
    the unedited model that they come from.
    """
    from surgeon.checkpoint.config import locate
    from surgeon.checkpoint.describe import describe
    from surgeon.checkpoint.stored import REPORT_FILE
    from surgeon.checkpoint.tensor_file import verify as verify_files
    from surgeon.named import is_recipe

    if output is not None and output.suffix.lower() != ".png":
        raise ValueError(f"the picture is a PNG; give -o a name that ends in .png, not {output.name!r}")
    if verify and is_recipe(what):
        raise ValueError(
            f"{what} is a recipe, which has no files to verify; name a folder that surgeon export wrote"
        )
    if other is not None and (output is not None or verify):
        raise ValueError("-o and --verify are for one checkpoint; leave them out, or the second one")
    verified = None
    if verify:
        folder = locate(what)
        verified = verify_files(folder, folder / REPORT_FILE)
    found = describe(what)
    for label, text in facts(found) if other is None else differences(found, describe(other)):
        print(
            textwrap.fill(text, WIDTH, initial_indent=f"{label:<{LABEL}}", subsequent_indent=" " * LABEL)
        )
    if verified is not None:
        print(f"{'files':<{LABEL}}{verified} files are as they were written (sizes and SHA-256)")
    if output is not None:
        from surgeon.findings.drawing import save
        from surgeon.findings.program import program_figure

        syncs = f"{found.program.sync_points(2)} synchronisations on two ranks"
        title = f"{found.name}: effective depth {found.depth:g} of {found.num_layers}, {syncs}"
        save(program_figure(found.program, found.num_layers, found.steps_per_layer, title), output)
        print(f"{'picture':<{LABEL}}{output}")


def facts(found: Surgery) -> Iterator[tuple[str, str]]:
    """Facts of a model or checkpoint, by label."""
    from surgeon.checkpoint.belongings import left_behind, left_by
    from surgeon.findings.program import outline_text
    from surgeon.language.sublayer import size_lines

    program = found.program
    steps = found.steps_per_layer
    yield "name", f"{found.name}, {what_it_is(found)}"
    yield "model", _model(found)
    yield "depth", f"{found.depth:g} of {found.num_layers} layers one after the other"
    unedited = "layers in turn" if found.from_scratch else "unedited"
    yield (
        "syncs",
        f"{program.sync_points(2)} per forward pass on two ranks ({unedited}: {found.unedited.sync_points(2)})",
    )
    yield from (("parameters", line) for line in _parameters(found))
    if found.recipe is not None:
        for operation in found.recipe.operations:
            yield "operation", operation.to_yaml()
        if found.recipe.weights is not None:
            yield "weights", found.recipe.weights
    yield "program", outline_text(program, found.num_layers, steps)
    yield from (("sizes", line) for line in size_lines(program.sublayers()))
    if not program.attended_nodes:
        yield "note", "there is no attention, so that no token looks at another"
    if found.training_line is not None:
        yield "trained", found.training_line
    if (codas := found.codas) is not None:
        said = f"of {plural(codas.depth, 'layer')} for every rack but the last"
        yield "codas", f"{said}; racks of the layers {', '.join(codas.racks)}"
    if behind := left_behind(left_by(found.report)):
        yield "left behind", behind
    if isinstance(proof := found.report.get("proof"), dict):
        whose = "the program's" if found.training_line is None else "those of the trained weights"
        text = f"on {proof['tokens']} random tokens its logits differ from {whose} by "
        text += f"{proof['exact']:.1g} of their scale"
        if proof["dtype"] != "float32":  # which stands for all that was not rounded
            text += f", {proof['written']:.1g} as stored in {proof['dtype']}"
        yield "proof", text


def differences(a: Surgery, b: Surgery) -> Iterator[tuple[str, str]]:
    """Labelled differences between two checkpoints or recipes; recipes have no tensors to compare."""
    from surgeon.checkpoint.describe import compare
    from surgeon.progress import progress

    ours = _join(facts(a))
    theirs = _join(facts(b))
    for label in dict.fromkeys([*ours, *theirs]):
        if label == "name" or ours.get(label) != theirs.get(label):
            yield label, f"A: {ours.get(label, 'nothing')}"
            yield "", f"B: {theirs.get(label, 'nothing')}"
    if a.recipe is not None or b.recipe is not None:
        return
    with progress("comparing", a.stored.size, "bytes") as advance:
        found = compare(a, b, advance)
    for key, values in found.config.items():
        yield "config", f"{key}: {_value(values[0])} | {_value(values[1])}"
    for name, difference in found.files.items():
        yield "files", f"{name}: {difference}"
    yield "tensors", f"{found.equal} equal, bit for bit"
    for label, names in (("only in A", found.only_a), ("only in B", found.only_b)):
        if names:
            yield label, f"{len(names)}: {first_few(names, _NAMED)}"
    for name, difference in found.different.items():
        yield "different", f"{name}: {difference}"


def _join(lines: Iterable[tuple[str, str]]) -> dict[str, str]:
    texts: dict[str, list[str]] = {}
    for label, text in lines:
        texts.setdefault(label, []).append(text)
    return {label: "; ".join(all_of_it) for label, all_of_it in texts.items()}


def _value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[: _LONGEST_VALUE - 3]}..."


def _parameters(found: Surgery) -> Iterator[str]:
    shapes = found.stored.family.layer_shapes(found.stored.config)
    program = found.program
    left = program.parameters(shapes)
    before = found.unedited.parameters(shapes)
    source = found.report.get("source", {}).get("parameters")
    if left != before:
        yield f"{left:,} of {before:,} in the layers' matrices ({left / before:.1%})"
    elif program != program.whole() and isinstance(
        source, int
    ):  # all layers are as narrow as config.json says
        left = found.stored.parameters
        yield f"{left:,} of {source:,} ({left / source:.1%})"


def _model(found: Surgery) -> str:
    from surgeon.machine import show_size

    stored = found.stored
    config = found.stored.config
    units = stored.family.units(config)
    text = (
        f"{stored.family.name}, {config.hidden_size} wide, {units['heads']} heads over {units['kv_heads']} KV heads, "
        f"vocabulary {config.vocab_size}"
    )
    shapes = stored.family.layer_shapes(config)
    if (mixture := shapes.mixture) is not None:
        active = found.program.active_parameters(shapes)
        all_of_them = found.program.parameters(shapes)
        text += f", {mixture.experts} experts of which a token goes to {mixture.top_k}"
        text += f" ({active / all_of_them:.0%} of the layers' matrices)"
    if found.recipe is not None:
        return text
    how = f", stored as {', '.join(stored.schemes)}" if stored.schemes else ""
    return f"{text}; {stored.parameters / 1e6:,.1f}M parameters, {show_size(stored.size)}{how}"


def what_it_is(found: Surgery) -> str:
    """A few words behind its name."""
    if found.recipe is not None:
        return f"a recipe for {found.original}"
    if not found.report:
        inside = found.form is not None and found.form.shipped is not None
        if inside:
            return f"a checkpoint in {found.form} form"
        return "a checkpoint"
    if found.from_scratch:
        return (
            f"trained from scratch, in {found.form} form, by surgeon {found.report.get('surgeon', '?')}"
        )
    healed = "" if found.training_line is None else ", trained since"
    return (
        f"{found.original} in {found.form} form, by surgeon {found.report.get('surgeon', '?')}{healed}"
    )
