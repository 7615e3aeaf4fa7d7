"""The model card of an exported checkpoint: README.md, made of surgeon.json, the checkpoint itself, and measurements.

`card.md` beside this file is its text, with places for what is worked out here. A card ends with a comment that holds a
hash of what stands above it, so that a card that somebody has changed since is known as such.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.checkpoint.describe import Surgery, describe
from surgeon.checkpoint.inherit import CARD_FILE, Inherited
from surgeon.findings import card_sections as sections
from surgeon.findings.measured import Identity, Measured
from surgeon.language.program import Program
from surgeon.named import hub_name
from surgeon.processes.files import write_text
from surgeon.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

TEMPLATE = Path(__file__).with_suffix(".md")
WIDTH = 100  # of the card's lines
_SEAL = re.compile(r"<!-- written by surgeon [\w.+-]+; sha256 of what stands above: ([0-9a-f]{64}) -->\n\Z")


def open_edited(folder: Path) -> Surgery:
    """What is known of a checkpoint that `surgeon export` wrote.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if it is no such checkpoint, or damaged.
    """
    found = describe(folder)
    if not found.report:
        raise ValueError(f"{folder} has no surgeon.json; cards are for checkpoints that surgeon export has written")
    return found


def identity_of(found: Surgery) -> Identity:
    """What measurements of an exported checkpoint must be of; its weights are read."""
    own = found.stored.checkpoint.model_hash()
    source_hash = found.report["source"].get("model_hash")
    dense = Program.dense(found.num_layers, found.steps_per_layer)
    trained = found.training is not None
    return Identity(found.name, own, found.stored.program, source_hash, found.program, dense, trained)


def write_card(folder: Path, name: str, measured: Measured | None = None) -> Inherited:
    """Write the card of the exported checkpoint in a folder; returns what it has from the base model's card.

    Args:
        name: what the card calls the checkpoint.
    """
    from huggingface_hub import ModelCard

    found = open_edited(folder)
    measured = measured or Measured()
    inherited = inherited_by(found)
    card = ModelCard.from_template(
        _metadata(found, name, inherited, measured),
        template_path=str(TEMPLATE),
        name=name,
        found=found,
        inherited=inherited,
        measured=measured,
        table=sections.table,
        line=sections.one_line,
        **sections.surgery(found),
        **sections.training_stages(found.training, name),
        quality=sections.quality(measured.scores, name),
        speed=lambda bench: sections.speed(bench, name),
        **sections.usage(found, folder, name),
        **sections.belongings(found, folder, inherited),
    )
    card.text = _laid_out(card.text)
    write_text(folder / CARD_FILE, f"{card}{_seal(str(card))}")
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
            "overwrite to replace it"
        )


def inherited_by(found: Surgery) -> Inherited:
    """What the base model's card said when the checkpoint was exported."""
    return Inherited.from_json(found.report.get("source", {}).get("card"))


def _seal(text: str) -> str:
    return f"<!-- written by surgeon {__version__}; sha256 of what stands above: {_digest(text)} -->\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _metadata(found: Surgery, name: str, inherited: Inherited, measured: Measured) -> ModelCardData:
    """What stands at the head of the card, for the hub."""
    from huggingface_hub import EvalResult, ModelCardData

    carried = dict(inherited.metadata)
    tags = carried.pop("tags", [])
    if isinstance(tags, str):
        tags = [tags]
    original = hub_name(found.original or "")  # of a folder only the last part is kept
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
    return ModelCardData(
        base_model=None if original is None else original.repository,
        library_name="transformers",
        pipeline_tag=carried.pop("pipeline_tag", "text-generation"),
        tags=[*tags, "surgeon"],
        model_name=name if results else None,
        eval_results=results or None,
        **carried,
    )


def _laid_out(text: str) -> str:
    """Its paragraphs in lines that people can read in an editor, with one empty line between them."""
    lines = []
    in_code = False
    for line in re.sub(r"\n{3,}", "\n\n", text.strip("\n")).split("\n"):
        in_code ^= line.startswith("```")
        as_it_is = in_code or line.startswith(("```", "|", "#"))
        indent = ""
        if line.startswith("- "):
            indent = "  "
        filled = textwrap.fill(line, WIDTH, subsequent_indent=indent, **sections.WHOLE)
        lines.append(line if as_it_is else filled)
    return "\n" + "\n".join(lines) + "\n\n"
