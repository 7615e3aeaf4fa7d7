"""How far an edited model computes what its original does, so that one pass is enough for both.

Up to the first node that differs, both have the same stream, as long as nothing there is trained. It is computed once,
as the student's, and the teacher begins behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.language.program import Program, steps_of
from surgeon.language.sublayer import Sublayer
from surgeon.models.edit import edited_layers
from surgeon.models.edited_layers import EditedLayers
from surgeon.models.families import family_of
from surgeon.models.weights.store import dense

_ELSEWHERE = ("classifier_dropout", "summary_first_dropout")  # rates of heads that no causal language model has


def shared_prefix(student: nn.Module, teacher: PreTrainedModel, program: Program) -> int:
    """After how many nodes of its program a student has the stream of its teacher, before training and during it.

    So it is where these nodes are the original's, nothing in them or before them is trained, numbers are the teacher's,
    and none is drawn at random, as dropout does.

    Args:
        student: edited, or peft's around it, with the parameters chosen that are trained.
        teacher: runs its dense program, edited.
        program: the student's, in the numbers of the original's layers.
    """
    model = next(module for module in student.modules() if isinstance(module, PreTrainedModel))
    if _has_dropout(model) or not _same_and_frozen(_before_layers(model), _before_layers(teacher)):
        return 0
    mine = edited_layers(model)
    theirs = edited_layers(teacher)
    count = 0
    for node, own, other in zip(program.nodes, mine.program.nodes, theirs.program.nodes, strict=False):
        if node != other:
            break
        pairs = zip(steps_of((own,)), steps_of((other,)), strict=True)
        modules = (pair for step, wanted in pairs for pair in zip(step.sublayers, wanted.sublayers, strict=True))
        if not all(_same_and_frozen(_parameters(mine, one), _parameters(theirs, two)) for one, two in modules):
            break
        count += 1
    reads_before = count < len(program) and any(step.late for step in steps_of(program.nodes[count : count + 1]))
    return max(0, count - reads_before)  # a late step reads the stream before the last output is added


@contextmanager
def beginning_behind(model: PreTrainedModel, node: int, stream: Tensor | None) -> Iterator[None]:
    """Inside, an edited model's passes begin behind a node, with this stream, (batch, tokens, hidden); None for not."""
    layers = edited_layers(model)
    layers.begins = None if stream is None else (node, stream)
    try:
        yield
    finally:
        layers.begins = None


def _has_dropout(model: PreTrainedModel) -> bool:
    rates = {name: rate for name, rate in model.config.to_dict().items() if "drop" in name and name not in _ELSEWHERE}
    return any(isinstance(rate, float) and rate > 0 for rate in rates.values())


def _before_layers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Embeddings, and whatever else is neither a layer nor behind them."""
    family = family_of(model.config)
    behind = tuple(f"{path}." for path in (family.layers, family.final_norm, family.head))
    return {name: one for name, one in model.named_parameters() if not name.startswith(behind)}


def _parameters(layers: EditedLayers, sublayer: Sublayer) -> dict[str, Tensor]:
    spec = layers.family.spec(sublayer.kind, sublayer.layers[0])
    owner = layers.owner(sublayer)
    called = [owner.get_submodule(path) for path in (spec.norm, *spec.modules) if path is not None]
    return {f"{index}.{name}": one for index, part in enumerate(called) for name, one in part.named_parameters()}


def _same_and_frozen(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    if own.keys() != theirs.keys() or any(one.requires_grad for one in own.values()):
        return False
    pairs = ((dense(one), dense(theirs[name])) for name, one in own.items())
    return all(one.shape == other.shape and torch.equal(one.to(other), other) for one, other in pairs)
