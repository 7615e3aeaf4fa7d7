"""What several tests of checkpoints share: sources of every shape, and a plain computation of programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.checkpoint.forms import form_of
from surgeon.checkpoint.random_weights import RandomCheckpoint
from surgeon.checkpoint.stored import Checkpoint
from surgeon.exports.export import plan_export, write_export
from surgeon.exports.prove import Proof
from surgeon.language.program import Fork, Node, Program, Step
from surgeon.language.sublayer import Sublayer
from surgeon.opened import Model, open_model
from tests.reference import Reference
from tests.tiny_models import VOCABULARY, tiny_model

IDS = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
BIASES = {"attention_bias": True, "mlp_bias": True}
WITH_PADDING = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}


def open_random(path: Path) -> Model:
    """Open the model of a config.json, with random weights."""
    return replace(open_model(path, weights=False), files=RandomCheckpoint(path))


def save_source(
    folder: Path,
    family: str = "llama",
    num_layers: int = 6,
    shards: str = "1GB",
    dtype: Any = None,
    **overrides: Any,
) -> Any:
    """Write a tiny random model; returns it, in float32, with the weights as they were written."""
    model = tiny_model(family, num_layers, **overrides)
    if dtype is not None:
        model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shards)
    return model.float().eval()


def run_export(source: Path, target: Path, program: str, **options: Any) -> Proof:
    """Plan and write in one go."""
    writing = {key: options.pop(key) for key in ("overwrite", "recipe", "advance") if key in options}
    plan = plan_export(open_model(source), Program.parse(program), **options)
    return write_export(plan, target, **writing)


def load_shipped(folder: Path) -> PreTrainedModel:
    """Load a fused or program checkpoint by the modeling file that lies inside it, in float32."""
    config = json.loads((folder / "config.json").read_text())
    shipped = form_of(Checkpoint(folder)).shipped
    assert shipped is not None
    model_class = shipped.model_class(config["model_type"].removeprefix(shipped.prefix), folder)
    return model_class.from_pretrained(folder, dtype=torch.float32).eval()


def weights_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    checkpoint = Checkpoint(folder)
    return {name: checkpoint.tensor(name) for name in checkpoint.names()}


@torch.no_grad()
def logits_of(model: Any, ids: Tensor = IDS, **inputs: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids, **inputs).logits
    return found


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def plain_logits(model: Any, program: str, ids: Tensor = IDS) -> Tensor:
    """Logits of a program, computed without surgeon's executor and without the modeling code of transformers.

    A step's input is the branch's first stream plus the outputs of all nodes before it (for a late step, of all but
    the last one of them).
    """
    reference = Reference(model)
    stream = reference.embed(ids)
    return reference.logits(stream + sum(_outputs(reference, Program.parse(program).nodes, stream)))


def _outputs(reference: Reference, nodes: tuple[Node, ...], start: Tensor) -> list[Tensor]:
    outputs: list[Tensor] = []
    for node in nodes:
        if isinstance(node, Fork):
            here = start + sum(outputs)
            outputs.append(sum(sum(_outputs(reference, branch, here)) for branch in node.branches))
        else:
            seen = outputs[:-1] if node.late else outputs
            outputs.append(_step(reference, node, start + sum(seen)))
    return outputs


def _step(reference: Reference, step: Step, x: Tensor) -> Tensor:
    return sum(_sublayer(reference, sublayer, x) for sublayer in step.sublayers)


def _sublayer(reference: Reference, sublayer: Sublayer, x: Tensor) -> Tensor:
    layer = sublayer.layers[0]
    if len(sublayer.layers) > 1:
        reference = reference.averaged(list(sublayer.layers), into=layer)
    if sublayer.experts is not None:
        reference = reference.experts(layer, sublayer.experts)
    if sublayer.width is not None:
        reference = reference.narrowed(layer, sublayer.kind, sublayer.width)
    for role, rank in sublayer.ranks:
        reference = reference.truncated(layer, role, rank)
    if sublayer.piece is not None:
        reference = _only_slice(reference, sublayer)
    return (reference.attention if sublayer.kind == "A" else reference.feed_forward)(layer, x)


def _only_slice(reference: Reference, sublayer: Sublayer) -> Reference:
    """A copy in which the other slices' heads or neurons have no way to the stream."""
    index, count = sublayer.piece  # type: ignore[misc]
    copied = reference.averaged([sublayer.layers[0]], into=sublayer.layers[0])
    name = copied.at(sublayer.layers[0], {"A": copied.output, "F": copied.down}[sublayer.kind])
    weight = copied.w[f"{name}.weight"].clone()
    # Which stores (in_features, out_features).
    columns = weight.T if copied.config.model_type == "gpt2" else weight
    there = copied.kept.get((sublayer.kind, sublayer.layers[0]), torch.arange(columns.shape[1]))
    own = there.chunk(count)[index]
    columns[:, [column for column in range(columns.shape[1]) if column not in own]] = 0
    copied.w[f"{name}.weight"] = weight
    if index and f"{name}.bias" in copied.w:
        copied.w[f"{name}.bias"] = torch.zeros_like(copied.w[f"{name}.bias"])
    return copied
