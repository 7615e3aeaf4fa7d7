"""Distillation: training an edited model towards its original's predictions and streams.

The loss has three weighted parts, each a mean over the predicted tokens:

    logits   T^2 KL(softmax(t / T) || softmax(s / T)) over the vocabulary (Hinton et al. 2015, arXiv 1503.02531)
    hidden   |s - t|^2 / |t|^2 of the stream, averaged over the places that the two programs share
    text     the negative log-likelihood of the text
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.language.program import Program, steps_of
from surgeon.language.sublayer import Sublayer
from surgeon.models.edit import EditedLayers, decoder_layers, edit, edited_layers, program_of
from surgeon.models.families import family_of
from surgeon.models.families.specs import SublayerSpec
from surgeon.models.weights.store import dense
from surgeon.quality.head import OutputHead
from surgeon.training.head_loss import (
    LogitsTask,
    TeacherStream,
    TeacherTarget,
    loss_at_head,
    next_tokens,
)
from surgeon.training.teacher_logits import TeacherLogits
from surgeon.training.texts import model_inputs
from surgeon.training.token_store import IGNORED


def counterparts(program: Program, num_layers: int) -> dict[int, int]:
    """Find the places at which an edited program's stream has a counterpart in its original.

    Layers that a program leaves out make the place ambiguous: `A0 F0 A2 F2` after F0 could stand for the original's
    stream before its layer 1, or after it. It stands for the one after it, which layer 2 was trained to read, so that
    what comes before the gap makes up for it. The program's end stands for the stream after all layers for the same
    reason. A late step counts where its output is added, a sublayer that averages layers as all of them, a slice as its
    layer.

    Args:
        program: of at least one node.
        num_layers: of the original.

    Returns:
        By the number of nodes that have landed in the stream, in program order up to all of them, the number of layers
            of the original.

    Raises:
        ValueError: if the program is empty, or names a layer that the original does not have.
    """
    program.require_steps()
    layers = [
        [layer for step in steps_of((node,)) for sublayer in step.sublayers for layer in sublayer.layers]
        for node in program.nodes
    ]
    highest = list(accumulate(map(max, layers), max))
    if highest[-1] >= num_layers:
        raise ValueError(
            f"the program has layer {highest[-1]}; the original's layers are 0 to {num_layers - 1}"
        )
    lowest_behind = list(accumulate(map(min, reversed(layers)), min))[::-1]
    cuts = zip(highest, lowest_behind[1:], strict=False)
    inside = {node: behind for node, (before, behind) in enumerate(cuts, start=1) if before < behind}
    return {**inside, len(layers): num_layers}


# Rates of heads that no causal language model has.
_ELSEWHERE = ("classifier_dropout", "summary_first_dropout")


def shared_prefix(student: nn.Module, teacher: PreTrainedModel, program: Program) -> int:
    """Count the first nodes after which a student has its teacher's stream, before training and during it.

    These nodes are the original's, nothing in them or before them is trained, their numbers are the teacher's, and
    there is no dropout.

    Args:
        student: edited, or peft's wrapper, with the trained parameters chosen.
        teacher: runs its dense program, edited.
        program: the student's, in the numbers of the original's layers.
    """
    model = next(module for module in student.modules() if isinstance(module, PreTrainedModel))
    rates = [
        rate
        for name, rate in model.config.to_dict().items()
        if "drop" in name and name not in _ELSEWHERE
    ]
    has_dropout = any(isinstance(rate, float) and rate > 0 for rate in rates)
    if has_dropout or not _same_and_frozen(_before_layers(model), _before_layers(teacher)):
        return 0
    mine = edited_layers(model)
    theirs = edited_layers(teacher)
    count = 0
    for node, own, other in zip(program.nodes, mine.program.nodes, theirs.program.nodes, strict=False):
        if node != other:
            break
        pairs = zip(steps_of((own,)), steps_of((other,)), strict=True)
        modules = (
            pair for step, wanted in pairs for pair in zip(step.sublayers, wanted.sublayers, strict=True)
        )
        if not all(
            _same_and_frozen(_parameters(mine, one), _parameters(theirs, two)) for one, two in modules
        ):
            break
        count += 1
    reads_before = count < len(program) and any(
        step.late for step in steps_of(program.nodes[count : count + 1])
    )
    return max(0, count - reads_before)  # a late step reads the stream before the last output is added


def _before_layers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters of embeddings, and of all else before the layers."""
    family = family_of(model.config)
    behind = tuple(f"{path}." for path in (family.layers, family.final_norm, family.head))
    return {name: one for name, one in model.named_parameters() if not name.startswith(behind)}


def modules_of(
    layers: EditedLayers, sublayer: Sublayer, paths: Callable[[SublayerSpec], Iterable[str]]
) -> list[nn.Module]:
    """List modules of a program's sublayer, by some of its paths."""
    spec = layers.family.spec(sublayer.kind, sublayer.layers[0])
    return [layers.owner(sublayer).get_submodule(path) for path in paths(spec)]


def _parameters(layers: EditedLayers, sublayer: Sublayer) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": one
        for index, part in enumerate(modules_of(layers, sublayer, lambda spec: spec.stages))
        for name, one in part.named_parameters()
    }


def _same_and_frozen(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    if own.keys() != theirs.keys() or any(one.requires_grad for one in own.values()):
        return False
    pairs = ((dense(one), dense(theirs[name])) for name, one in own.items())
    return all(one.shape == other.shape and torch.equal(one.to(other), other) for one, other in pairs)


PARTS = ("logits", "hidden", "text")


@dataclass(frozen=True)
class Distillation:
    """Weights of what an edited model learns from its original.

    Attributes:
        logits: weight of the divergence from the original's predictions.
        hidden: weight of the relative error of the stream.
        text: weight of the text's negative log-likelihood.
        temperature: divides both models' logits for their divergence.
        kept: number of the original's logits that are kept on disk for each token, instead of an original in memory;
            None for the latter.

    Raises:
        ValueError: if nothing is taken from the original, a weight is negative, the temperature is not above 0, or
            hidden streams are asked for where only logits are kept.
    """

    logits: float = 1.0
    hidden: float = 0.0
    text: float = 0.0
    temperature: float = 1.0
    kept: int | None = None

    def __post_init__(self) -> None:
        for name in PARTS:
            weight = getattr(self, name)
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"the weight of {name} must be a number from 0 on, not {weight}")
        if not self.logits and not self.hidden:
            raise ValueError(
                "distillation needs a weight above 0 for logits or hidden; without, train on text alone"
            )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"the temperature must be a number above 0, not {self.temperature}")
        if self.kept is None:
            return
        if self.kept < 1:
            raise ValueError(
                f"at least 1 of the original's logits has to be kept for each token, not {self.kept}"
            )
        if self.hidden:
            raise ValueError(
                "hidden streams need the original in memory; keep no logits on disk, or give hidden 0"
            )

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(name for name in PARTS if getattr(self, name))


class TeacherOutput(NamedTuple):
    """A teacher's predictions and streams on some windows.

    Attributes:
        target: predictions; None where they have no weight.
        streams: (windows, tokens, hidden), by the student's nodes.
        places: number of compared streams, with those that are the student's own.
    """

    target: TeacherTarget | None
    streams: dict[int, Tensor]
    places: int = 0


class Distiller:
    """Computes the loss of a student.

    The teacher's parameters need no gradients, it stays in evaluation mode, and moves to the device of the student's
    batches. Where streams are compared or shared, it is edited to run its dense program.

    Attributes:
        shared: number of nodes after which the teacher's pass begins, with the student's stream (`share`).

    Args:
        program: the student's, in the numbers of the original's layers.
        teacher: the unedited original; or its logits on disk.

    Raises:
        ValueError: if the teacher runs an edited program, or the kept logits are not those that are asked for.
    """

    def __init__(
        self, distillation: Distillation, program: Program, teacher: PreTrainedModel | TeacherLogits
    ) -> None:
        self.distillation = distillation
        self.program = program
        self.teacher = teacher if isinstance(teacher, PreTrainedModel) else None
        self.stored = teacher if isinstance(teacher, TeacherLogits) else None
        self.counterparts: dict[int, int] = {}
        self.shared = 0
        if self.stored is not None:
            for name in ("kept", "temperature"):
                stored = getattr(self.stored, name)
                asked = getattr(distillation, name)
                if stored != asked:
                    raise ValueError(
                        f"{self.stored.folder} was made with {name} {stored}, not {asked}; make the logits again"
                    )
        if self.teacher is not None:
            if distillation.kept is not None:
                raise ValueError(
                    "the distillation asks for kept logits; give a TeacherLogits in place of a model"
                )
            own = require_unedited_teacher(self.teacher)
            self.teacher.eval().requires_grad_(False)
            if distillation.hidden:
                steps = family_of(self.teacher.config).steps_per_layer
                self.counterparts = counterparts(program, len(own) // steps)
                self._edit_teacher()

    def _edit_teacher(self) -> None:
        if self.teacher is not None and not isinstance(decoder_layers(self.teacher), EditedLayers):
            edit(self.teacher, program_of(self.teacher))

    def share(self, student: nn.Module) -> None:
        """Let the teacher begin where a student, as it is and will be trained, leaves it (`shared_prefix`)."""
        if self.teacher is not None:
            self._edit_teacher()
            self.shared = shared_prefix(student, self.teacher, self.program)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the loss of a micro-batch, a mean over its predicted tokens, and its parts.

        Args:
            model: the student or a wrapper of it (DDP, FSDP, peft); it is called once.
            batch: `input_ids` and `labels`, (windows, tokens), the latter -100 where nothing is predicted (a window's
                first token is never predicted); `position_ids` of documents that are apart; and `index`, (windows,),
                numbers of the training windows, if logits are kept on disk.

        Returns:
            `loss`, with its gradient; and those of `logits` (times T^2), `hidden` and `text` that have a weight,
                unweighted and without a gradient.

        Raises:
            ValueError: if the student runs no program, or another one, or has another vocabulary or size of the stream.
        """
        ask = partial(self._ask, batch)
        nodes = [*self.counterparts, self.shared]
        return distilled_loss(self.distillation, model, batch, nodes, len(self.program), ask)

    def _ask(self, batch: Mapping[str, Tensor], streams: Mapping[int, Tensor]) -> TeacherOutput:
        """Ask the teacher, or read its logits; it begins with the student's stream where it shares that."""
        if self.stored is not None:
            return TeacherOutput(self.stored.read(batch["index"]), {})
        assert self.teacher is not None
        windows = model_inputs(batch)
        if not self.shared:
            return ask_teacher(self.teacher, windows, self.counterparts, self.distillation)
        layers = edited_layers(self.teacher)
        layers.begins = (self.shared, streams[self.shared].detach())
        try:
            return ask_teacher(self.teacher, windows, self.counterparts, self.distillation, self.shared)
        finally:
            layers.begins = None


def require_unedited_teacher(teacher: PreTrainedModel) -> Program:
    """Return a teacher's program, its layers one after the other."""
    own = program_of(teacher)
    steps = family_of(teacher.config).steps_per_layer
    if own != Program.dense(len(own) // steps, steps):
        raise ValueError(
            "the teacher runs an edited program; use the original (surgeon.restore brings it back)"
        )
    return own


def ask_teacher(
    teacher: PreTrainedModel,
    windows: Mapping[str, Tensor],
    places: Mapping[int, int],
    distillation: Distillation,
    begins: int = 0,
) -> TeacherOutput:
    """Run a teacher in memory on some windows; it moves to their device.

    Args:
        windows: (windows, tokens) `input_ids`, and `position_ids` of documents that are apart (`model_inputs`).
        places: of the streams, as `counterparts` gives them.
        distillation: whether predictions are needed, and at which temperature.
        begins: node behind which its pass begins; places up to there are the student's own, and have no error.
    """
    device = windows["input_ids"].device
    if teacher.device != device and not hasattr(teacher, "hf_device_map"):
        teacher.to(device)  # type: ignore[arg-type] # transformers wraps it untyped
    steps = family_of(teacher.config).steps_per_layer
    nodes = {node: layer * steps for node, layer in places.items() if layer * steps > begins}
    without_head: Any = teacher.base_model
    with torch.no_grad(), watched_streams(teacher, sorted(nodes.values()), None, begins) as streams:
        normed = without_head(**windows, use_cache=False).last_hidden_state
    target = None
    if distillation.logits:
        target = TeacherStream(OutputHead(teacher), normed.flatten(0, 1), distillation.temperature)
    return TeacherOutput(target, {node: streams[place] for node, place in nodes.items()}, len(places))


def distilled_loss(
    distillation: Distillation,
    model: nn.Module,
    batch: Mapping[str, Tensor],
    nodes: Sequence[int],
    length: int,
    ask: Callable[[Mapping[int, Tensor]], TeacherOutput],
) -> dict[str, Tensor]:
    """Compute a student's loss with its gradient, and its weighted parts, each unweighted and without a gradient.

    All are means over the predicted tokens.

    Args:
        model, batch: as `Distiller.loss` takes them.
        nodes, length: as `watched_streams` takes them, of the student.
        ask: gives what the teacher says, of the student's streams by node; called when they have come to the head.
    """
    labels = next_tokens(batch["labels"])
    taught = TeacherOutput(None, {})
    with watched_streams(model, nodes, length) as streams:

        def task() -> LogitsTask:
            nonlocal taught
            taught = ask(streams)
            return LogitsTask(
                taught.target,
                labels.flatten(),
                distillation.temperature,
                distillation.logits,
                distillation.text,
            )

        at_head = loss_at_head(model, model_inputs(batch), task)
    loss = at_head.loss
    sums = {"logits": at_head.divergence, "text": at_head.nll}
    predicted = labels != IGNORED
    items = predicted.sum().clamp_min(1)
    if taught.streams:
        errors = [
            relative_error(streams[node], wanted, predicted) for node, wanted in taught.streams.items()
        ]
        hidden = torch.stack([error.to(loss.device) for error in errors]).sum() / taught.places
        loss = loss + distillation.hidden * hidden
        sums["hidden"] = hidden.detach()
    return {"loss": loss / items, **{name: sums[name] / items for name in distillation.parts}}


def relative_error(student: Tensor, teacher: Tensor, predicted: Tensor) -> Tensor:
    """S - t|^2 / |t|^2 summed over tokens, a number; deep streams, which are large, count no more than others.

    Args:
        student, teacher: (windows, tokens, hidden).
        predicted: (windows, tokens), tokens that count.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"the teacher's stream has {teacher.shape[-1]} numbers for a token and the student's {student.shape[-1]}; "
            "distil the logits only, or from the model that the program is of"
        )
    wanted = teacher.to(student.device).float()
    error = (student.float() - wanted).square().sum(-1)
    size = wanted.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(predicted.to(student.device), error / size, 0).sum()


@contextmanager
def watched_streams(
    model: nn.Module, nodes: Sequence[int], length: int | None, begins: int = 0
) -> Iterator[dict[int, Tensor]]:
    """Collect streams of the next forward pass, (batch, tokens, hidden), by the number of nodes that have landed.

    Args:
        model: runs a program, or wraps a model that does.
        nodes: numbers from 1; 0 stands for none.
        length: of the expected program.
        begins: node behind which the pass begins.

    Raises:
        ValueError: if the model runs none, or one of another length; at the end, if some stream was not seen.
    """
    streams: dict[int, Tensor] = {}
    wanted = set(nodes) - {0}
    if not wanted:
        yield streams
        return
    layers = next((module for module in model.modules() if isinstance(module, EditedLayers)), None)
    if layers is None or length not in (None, len(layers.program)):
        if layers is None:
            runs = "no program"
        else:
            runs = f"a program of {len(layers.program)} nodes"
        raise ValueError(
            f"the student runs {runs}, not the one its streams are compared by; edit it with that one"
        )
    landed = count(begins + 1)

    def keep(_: nn.Module, __: Any, after: Tensor) -> None:
        node = next(landed)
        if node in wanted:
            streams[node] = after

    hook = layers.stream_tap.register_forward_hook(keep)
    try:
        yield streams
    finally:
        hook.remove()
    if len(streams) < len(wanted):
        raise ValueError(
            "the model's streams were not seen in its forward pass, as when it is compiled or replicated by "
            "DataParallel; train without torch_compile and with one process for each device, or give hidden 0"
        )
