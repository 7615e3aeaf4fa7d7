"""The model card of an exported checkpoint: README.md, made of surgeon.json, the checkpoint itself, and measurements.

`card.md` is its template. A card ends with a comment that holds a hash of all above it, so that later changes show.
"""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from surgeon.checkpoint.belongings import (
    CARD_FILE,
    FileKind,
    Inherited,
    kind_of,
    left_behind,
    left_by,
    names_in,
)
from surgeon.checkpoint.config import DEMO
from surgeon.checkpoint.describe import STAGES, Surgery, describe
from surgeon.checkpoint.forms.base import NOT_ON_VLLM
from surgeon.findings.measured import DIVERGENCE, PERPLEXITY, CardScore, Identity
from surgeon.findings.result import Record, Table
from surgeon.language.operations import OPERATIONS
from surgeon.language.operations.applied import AppliedOperation
from surgeon.language.program import Program
from surgeon.language.recipe import operations_in
from surgeon.language.sublayer import FEED_FORWARD, size_lines
from surgeon.named import hub_name
from surgeon.processes.files import write_text
from surgeon.quality.summary import Quality
from surgeon.version import __version__
from surgeon.words import join_words, plural

TEMPLATE = Path(__file__).with_suffix(".md")
WIDTH = 100  # of the card's lines
_SEAL = re.compile(
    r"<!-- written by surgeon [\w.+-]+; sha256 of what stands above: ([0-9a-f]{64}) -->\n\Z"
)


def open_edited(folder: Path) -> Surgery:
    """Describe a checkpoint that `surgeon export` wrote."""
    found = describe(folder)
    if not found.report:
        raise ValueError(
            f"{folder} has no surgeon.json; cards are for checkpoints that surgeon export has written"
        )
    return found


def identity_of(found: Surgery) -> Identity:
    """The identity that measurements of an exported checkpoint must have; its weights are read."""
    own = found.stored.checkpoint.model_hash()
    source_hash = found.report["source"].get("model_hash")
    dense = Program.dense(found.num_layers, found.steps_per_layer)
    trained = found.training is not None
    return Identity(found.name, own, found.stored.program, source_hash, found.program, dense, trained)


def write_card(folder: Path, name: str, measured: Sequence[CardScore] = ()) -> Inherited:
    """Write the card of the exported checkpoint in a folder, under a name; returns what the base model's card gave."""
    from huggingface_hub import ModelCard, ModelCardData

    found = open_edited(folder)
    inherited = Inherited.from_json(found.report.get("source", {}).get("card"))
    carried = dict(inherited.metadata)
    tags = carried.pop("tags", [])
    if isinstance(tags, str):
        tags = [tags]
    original = hub_name(found.original or "")  # of a folder only the last part is kept
    unedited = "unedited"
    if found.from_scratch:
        unedited = "its layers in turn"
    dense = Program.dense(found.num_layers, found.steps_per_layer)
    before = found.report.get("source", {}).get("parameters")
    rows = [
        ["layers one after the other (effective depth)", f"{found.depth:g}", str(found.num_layers)],
        [
            "synchronisations per pass on two tensor-parallel ranks",
            *(str(each.sync_points(2)) for each in (found.program, dense)),
        ],
        ["parameters", f"{found.stored.parameters:,}", f"{before:,}" if isinstance(before, int) else ""],
    ]
    if not measured:
        quality = None
    else:
        by_place = {(one.key, one.metric, one.edited): one for one in measured}
        columns = 2
        if any(not one.edited for one in measured):
            columns = 3
        of_quality = []
        for key, metric in dict.fromkeys((one.key, one.metric) for one in measured):
            pair = [by_place.get((key, metric, edited)) for edited in (True, False)]
            on = next(one.on for one in pair if one is not None)
            of_quality.append(
                [f"{metric} ({on})", *("" if one is None else one.shown for one in pair)][:columns]
            )
        quality = Table("", ["", name, "unedited"][:columns], of_quality)
    card = ModelCard.from_template(
        ModelCardData(
            base_model=None if original is None else original.repository,
            library_name="transformers",
            pipeline_tag=carried.pop("pipeline_tag", "text-generation"),
            tags=[*tags, "surgeon"],
            **carried,
        ),
        template_path=str(TEMPLATE),
        name=name,
        found=found,
        inherited=inherited,
        quality=quality,
        facts=Table("", ["", name, unedited], rows),
        line=one_line,
        **surgery(found),
        **training_stages(found.training, name),
        **usage(found, folder, name),
        **belongings(found, folder, inherited),
    )
    lines = []
    in_code = False
    for line in re.sub(r"\n{3,}", "\n\n", card.text.strip("\n")).split("\n"):
        in_code ^= line.startswith("```")
        as_it_is = in_code or line.startswith(("```", "|", "#"))
        indent = ""
        if line.startswith("- "):
            indent = "  "
        filled = textwrap.fill(line, WIDTH, subsequent_indent=indent, **WHOLE)
        lines.append(line if as_it_is else filled)
    card.text = "\n" + "\n".join(lines) + "\n\n"
    digest = hashlib.sha256(str(card).encode()).hexdigest()
    seal = f"<!-- written by surgeon {__version__}; sha256 of what stands above: {digest} -->\n"
    write_text(folder / CARD_FILE, f"{card}{seal}")
    return inherited


def require_own_card(folder: Path) -> None:
    """Refuse to replace a card that somebody else has written or changed."""
    path = folder / CARD_FILE
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    match = _SEAL.search(text)
    if match is None or match[1] != hashlib.sha256(text[: match.start()].encode()).hexdigest():
        raise FileExistsError(
            f"{path} was not written by surgeon, or was changed since; keep what you added elsewhere, and pass "
            "`overwrite` to replace it"
        )


PROGRAM_WIDTH = 80
WHOLE: Any = {"break_long_words": False, "break_on_hyphens": False}
PROMPT = "Once upon a time"
RANKS = 2  # of the examples
# Of what training changed: what is measured, and when.
METRICS = {PERPLEXITY: PERPLEXITY, DIVERGENCE: "divergence from the original, nats per token"}
COLUMNS = {
    "healed": "{name}",
    "trained": "{name}",
    "edited": "before training",
    "untrained": "with random weights",
    "original": "unedited",
}
# What signs of a program's text mean.
SIGNS = {
    "": "`A4` and `F4` are the attention and the feed-forward of layer 4",
    "[": "`[A4 A5]` read the same input, and their outputs are added together",
    ">": "`>A4` reads the stream as it was before the previous step's output was added",
    "{": "`{A4 F4 | A5 F5}` are branches that start from the same stream, each with one of its own; at the end what "
    "all of them added is added",
    "~": "`A4~A5` is one sublayer with the averaged weights of both",
    "@": "`F4@up64,down96` has two factors in place of matrices, of rank 64 for up and 96 for down",
    "#": "`A4#3` has 3 of its KV groups (each a KV head with all heads that share it), `F4#344` 344 of its neurons",
    "/": "`A4/2:0` is the first of two slices of the heads (for `F`, of the neurons)",
}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")


def surgery(found: Surgery) -> Record:
    """The surgery, its program and its proof, for the template."""
    report = found.report
    program = found.program
    by = f"surgeon {report.get('surgeon', '')}"
    layers = plural(found.num_layers, "layer")
    how = trained_how(found.training, found.from_scratch)
    kind = found.stored.family.name
    what_it_is = f"This is {_base(found.original)} ({kind}, {layers}) after surgery with {by}, {how}."
    if found.from_scratch:
        what_it_is = (
            f"This is a {kind} of {layers}, made with {by} and {how}. There is no original behind it."
        )
    operations: tuple[AppliedOperation, ...] = ()
    recipe = report.get("recipe") or (found.training or {}).get("configuration")
    if isinstance(recipe, str):
        with suppress(ValueError):  # of a recipe that cannot be read the program says all
            operations = operations_in(recipe)
    proof = report.get("proof")
    differ = ""
    if not isinstance(proof, dict):
        proof = None
    elif not proof["exact"] and not proof["written"]:
        differ = "The logits are equal, number by number."
    else:
        stored = ""
        if proof["dtype"] != "float32":
            stored = f", and by {proof['written']:.2g} as stored in {proof['dtype']}"
        differ = f"The logits differ by {proof['exact']:.2g} of the largest one in float32{stored}."
    signs = [text for sign, text in SIGNS.items() if sign in str(program)]
    sublayers = list(program.sublayers())
    if len(set(sublayers)) < len(sublayers):
        signs.append("what is there several times runs again, with the same weights")
    nodes = (str(node).replace(" ", "\N{NO-BREAK SPACE}") for node in program.nodes)
    return {
        "what_it_is": one_line(what_it_is),
        "operations": operations,
        "summaries": OPERATIONS,
        "program": textwrap.fill(" ".join(nodes), PROGRAM_WIDTH, **WHOLE).replace(
            "\N{NO-BREAK SPACE}", " "
        ),
        "legend": f"{'; '.join(signs)}.",
        "sizes": list(size_lines(program.sublayers())),
        "proof": proof,
        "differ": differ,
        "source_hash": report.get("source", {}).get("model_hash"),
        "gguf": report.get("source", {}).get("gguf"),
    }


def trained_how(training: Record | None, from_scratch: bool = False) -> str:
    """The end of the card's first sentence; from scratch, the first training began with random weights."""
    if training is None:
        return "without further training"
    stages = [training]
    while "earlier" in stages[0]:
        stages.insert(0, stages[0]["earlier"])
    said = []
    for stage in stages:
        tokens = (
            f"{plural(stage['tokens'], 'token')} of {stage['data']} (SHA-256 `{stage['data_hash']}`)"
        )
        said.append(f"{plural(stage['steps'], 'step')}, {tokens}, {stage['method']}")
    parts = []
    if from_scratch:
        parts = [f"trained from scratch: {said.pop(0)}"]
    if said:
        parts += [f"then trained further (healed): {'; then again: '.join(said)}"]
    return "; ".join(parts)


def training_stages(training: Record | None, name: str) -> Record:
    """Quality before and after on held-out text, for the template."""
    found = {
        stage: training[stage]
        for stage in STAGES
        if training is not None and training.get(stage) is not None
    }
    if training is None or not found:
        return {"stages": None}
    columns = [stage for stage in COLUMNS if stage in found]
    qualities = [Quality.from_json(found[stage]) for stage in columns]
    rows = [
        [label, *(one.words(metric, 4, 3) if one.knows(metric) else "" for one in qualities)]
        for metric, label in METRICS.items()
    ]
    head = ["", *(COLUMNS[stage].format(name=name) for stage in columns)]
    text = training.get("held_out")
    its_hash = training.get("held_out_hash")
    of = ""
    if isinstance(text, str):
        of = f" of {one_line(text)}"
    if isinstance(its_hash, str):
        of += f" (SHA-256 `{its_hash}`)"
    tokens = next(iter(found.values()))["tokens"]
    stages = Table("", head, [row for row in rows if any(row[1:])])
    return {"stages": stages, "held_out": {"tokens": tokens, "of": of}}


def usage(found: Surgery, folder: Path, name: str) -> Record:
    """Commands that load it in transformers, vLLM and surgeon, for the template."""
    form = found.form
    assert form is not None
    options = json.dumps(name) + (", trust_remote_code=True" if form.shipped is not None else "")
    serving = form.serving(found.stored, f"vllm serve {quote(name)}")
    units = found.stored.family.units(found.stored.config)
    heads = units["heads"]
    kv_heads = units.get("kv_heads", heads)
    # The plugin has neurons in parts of any size.
    neurons = set[int]()
    if "PATH_OF_SURGEON" not in serving[1]:
        neurons = {
            count
            for one in found.stored.program.sublayers()
            if one.kind == FEED_FORWARD
            for layer in one.layers
            for count in found.stored.weights.stored_units(FEED_FORWARD, layer).values()
        }
    counts = [
        count
        for count in range(1, heads + 1)
        if heads % count == 0
        and (kv_heads % count == 0 or count % kv_heads == 0)
        and not any(width % count for width in neurons)
    ]
    vllm_ranks = None
    on_vllm = not serving[0].startswith(NOT_ON_VLLM)
    if on_vllm and not all(count in counts for count in (2, 4, 8) if count <= heads):
        shared = [plural(heads, "head"), plural(kv_heads, "KV head")]
        if neurons:
            shared.append(f"{join_words(map(str, sorted(neurons)), 'or')} neurons")
        vllm_ranks = (
            f"vLLM shares {join_words(shared)} among {', '.join(map(str, counts))} "
            f"{'rank' if counts == [1] else 'ranks'}; `surgeon serve` takes any number."
        )
    return {
        "reason": found.report.get("reason"),
        "has_tokenizer": any(any(folder.glob(pattern)) for pattern in _TOKENIZERS),
        "shipped": form.shipped,
        "architectures": found.stored.checkpoint.entries.get("architectures"),
        "options": options,
        "vllm": serving,
        "vllm_ranks": vllm_ranks,
        "prompt": PROMPT,
        "tp": RANKS,
        "word": quote(name),
        "literal": json.dumps(name),
    }


def belongings(found: Surgery, folder: Path, inherited: Inherited) -> Record:
    """The base model's other files and its licence, for the template."""
    metadata = inherited.metadata
    licence = metadata.get("license")
    if licence is not None:
        licence = ", ".join(f"`{one}`" for one in ([licence] if isinstance(licence, str) else licence))
        called, target = (str(metadata.get(key, "")).strip() for key in ("license_name", "license_link"))
        if target:
            text = one_line(called or "its text").replace("[", "(").replace("]", ")")
            called = f"[{text}](<{target.replace('<', '%3C').replace('>', '%3E')}>)"
        if called:
            licence += f" ({called})"
    return {
        "behind": left_behind(left_by(found.report), _quote),
        "base": _base(found.original),
        "licence": licence,
        "terms": [_quote(name) for name in sorted(names_in(folder)) if kind_of(name) is FileKind.TERMS],
        "gated": any(key.startswith("extra_gated") for key in metadata),
    }


def _quote(name: str) -> str:
    return f"`{one_line(name).replace('`', chr(39))}`"


def _base(model: str | None) -> str:
    if (on_hub := hub_name(model or "")) is not None:
        return f"[{model}]({on_hub.address})"
    if model == DEMO:
        return "surgeon's demo model"
    return f"`{model}`"


def one_line(text: str) -> str:
    """Join the lines of a text."""
    return " ".join(text.split())
