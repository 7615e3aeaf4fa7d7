"""Distillation: training an edited model towards its original's predictions and streams.

The loss has three weighted parts, each a mean over the predicted tokens:

    logits   T^2 KL(softmax(t / T) || softmax(s / T)) over the vocabulary (Hinton et al. 2015, arXiv 1503.02531)
    hidden   |s - t|^2 / |t|^2 of the stream, averaged over the places that the two programs share
    text     the negative log-likelihood of the text

A teacher's largest log-probabilities on every training window may be kept in a folder: the teacher is run once. Each
safetensors file has some windows and is whole or not there, so that making them resumes after a kill; the run's
record says of which teacher and text they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.language.program import Program, steps_of
from surgeon.language.sublayer import Sublayer
from surgeon.machine import show_size
from surgeon.models.edit import EditedLayers, edit, edited_layers, program_of
from surgeon.models.families import family_of
from surgeon.models.weights.store import dense
from surgeon.processes.files import HALF_WRITTEN, lock_file, make_folder, whole_file
from surgeon.progress import progress
from surgeon.quality.head import OutputHead
from surgeon.training.head_loss import (
    LogitsTask,
    TeacherStream,
    TeacherTarget,
    TopLogits,
    loss_at_head,
    next_tokens,
)
from surgeon.training.scope import modules_of
from surgeon.training.settings import Distillation
from surgeon.training.texts import TrainingText, model_inputs
from surgeon.training.token_store import IGNORED

_FILE_BYTES = 16 << 20  # no more is lost in a kill
_MOST_WINDOWS = 128  # in a file
_LOCK = ".lock"
UNREADABLE = (OSError, SafetensorError)


@dataclass(frozen=True, eq=False)
class TeacherLogits:
    """A folder of kept logits, which a run alone has; `make` fills it.

    Attributes:
        text: all training windows.
        kept: tokens of the vocabulary that are kept for each token.
        temperature: divides the logits.
    """

    folder: Path
    text: TrainingText
    kept: int
    temperature: float

    @property
    def window_bytes(self) -> int:
        """Bytes of a window: an id (int32) and a log-probability (float32) each, and the rest's."""
        return 4 * self.text.window * (2 * self.kept + 1)

    @property
    def files(self) -> list[range]:
        at_once = max(1, min(_MOST_WINDOWS, _FILE_BYTES // self.window_bytes))
        count = len(self.text)
        return [range(first, min(first + at_once, count)) for first in range(0, count, at_once)]

    def read(self, index: Tensor) -> TopLogits:
        """Read the logits of some windows, one after the other.

        Args:
            index: (windows,), numbers of training windows.

        Raises:
            OSError: if a file is gone or damaged.
        """
        files = self.files
        rows = []
        for window in map(int, index):
            windows = files[window // len(files[0])]
            path = self._path(windows)
            try:
                with safe_open(path, "pt") as file:
                    row = window - windows.start
                    rows.append(TopLogits(*(file.get_slice(name)[row] for name in TopLogits._fields)))
            except UNREADABLE as error:
                raise OSError(
                    f"{path} cannot be read any more ({error}); start again, and it is made again"
                ) from error
        return TopLogits.join(rows)

    def loss(
        self, distillation: Distillation, model: nn.Module, batch: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Compute a student's loss as `Distiller.loss`; `index` of a batch, (windows,), numbers training windows."""
        taught = TeacherOutput(self.read(batch["index"]), {})
        return distilled_loss(distillation, model, batch, (), 0, lambda _: taught)

    def make(self, teacher: PreTrainedModel) -> None:
        """Run the teacher on every training window that is missing; of several processes one does, the others wait.

        Args:
            teacher: unedited; it is left in evaluation mode.

        Raises:
            ValueError: if the teacher's logits are not finite, or fewer than are to be kept.
            OSError: if the disk is full; files that are whole stay.
        """
        make_folder(self.folder)
        if any(not self._is_whole(windows) for windows in self.files):
            with lock_file(self.folder / _LOCK):
                for part in self.folder.glob(HALF_WRITTEN):  # of a process that was killed
                    part.unlink()
                missing = [windows for windows in self.files if not self._is_whole(windows)]
                if missing:  # or another process has made them meanwhile
                    self._write(teacher, missing)

    def _write(self, teacher: PreTrainedModel, missing: list[range]) -> None:
        total = len(self.text)
        left = sum(map(len, missing))
        teacher.eval()
        with progress("the teacher's logits", total, "windows", total - left) as advance:
            for windows in missing:
                parts = []
                for window in windows:
                    parts.append(self._top_of(teacher, window))
                    advance(1)
                shaped = {
                    name: tensor.unflatten(0, (len(windows), -1))
                    for name, tensor in TopLogits.join(parts)._asdict().items()
                }
                try:
                    with whole_file(self._path(windows)) as beside:
                        save_file(shaped, beside)
                except UNREADABLE as error:
                    size = show_size(total * self.window_bytes)
                    raise OSError(
                        f"the teacher's logits cannot be written to {self.folder} ({error}); they take {size} "
                        "in all: make room and start again, which goes on from here, or keep fewer than "
                        f"{self.kept} for each token"
                    ) from error

    @torch.inference_mode()
    def _top_of(self, teacher: PreTrainedModel, window: int) -> TopLogits:
        row = model_inputs(self.text.rows.with_format("torch")[window : window + 1])
        inputs = {name: one.to(teacher.device) for name, one in row.items()}
        stream = teacher.base_model(**inputs, use_cache=False).last_hidden_state[0]
        head = OutputHead(teacher)
        blocks = stream.to(head.weight.device).split(head.rows(len(stream)))
        parts = [TopLogits.of(head.logits(block), self.kept, self.temperature) for block in blocks]
        top = TopLogits(*(each.cpu() for each in TopLogits.join(parts)))
        if not top.log_p.isfinite().all():
            raise ValueError(
                f"the teacher's logits are not finite in training window {window}; are its weights damaged?"
            )
        return top._replace(ids=top.ids.int())

    def _is_whole(self, windows: range) -> bool:
        path = self._path(windows)
        if not path.is_file():
            return False
        try:
            with safe_open(path, "pt"):
                return True
        except UNREADABLE as error:
            warnings.warn(f"{path} is damaged ({error}); it is made again", stacklevel=2)
            return False

    def _path(self, windows: range) -> Path:
        return self.folder / f"windows-{windows.start:07}.safetensors"


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

    The teacher's parameters need no gradients, it stays in evaluation mode, is edited to run its dense program, and
    moves to the device of the student's batches.

    Attributes:
        shared: number of nodes after which the teacher's pass begins, with the student's stream (`shared_prefix`).

    Args:
        program: the student's, in the numbers of the original's layers.
        teacher: the unedited original.

    Raises:
        ValueError: if the teacher runs an edited program.
    """

    def __init__(self, distillation: Distillation, program: Program, teacher: PreTrainedModel) -> None:
        own = require_unedited_teacher(teacher)
        self.distillation = distillation
        self.program = program
        self.teacher = edit(teacher, own)
        self.teacher.eval().requires_grad_(False)
        self.counterparts: dict[int, int] = {}
        self.shared = 0
        if distillation.hidden:
            layers = len(own) // family_of(teacher.config).steps_per_layer
            self.counterparts = counterparts(program, layers)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the loss of a micro-batch, a mean over its predicted tokens, and its parts.

        Args:
            model: the student or a wrapper of it (DDP, FSDP, peft); it is called once.
            batch: `input_ids` and `labels`, (windows, tokens), the latter -100 where nothing is predicted (a window's
                first token is never predicted); and `position_ids` of documents that are apart.

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
        """Ask the teacher; it begins with the student's stream where it shares that."""
        layers = edited_layers(self.teacher)
        if self.shared:
            layers.begins = (self.shared, streams[self.shared].detach())
        try:
            return ask_teacher(
                self.teacher, model_inputs(batch), self.counterparts, self.distillation, self.shared
            )
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
        # |s - t|^2 / |t|^2 summed over tokens; deep streams, which are large, count no more than others.
        errors = []
        for node, teachers in taught.streams.items():
            student = streams[node]
            if student.shape != teachers.shape:
                raise ValueError(
                    f"the teacher's stream has {teachers.shape[-1]} numbers for a token and the student's "
                    f"{student.shape[-1]}; distil the logits only, or from the model that the program is of"
                )
            wanted = teachers.to(student.device).float()
            error = (student.float() - wanted).square().sum(-1)
            size = wanted.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
            summed = torch.where(predicted.to(student.device), error / size, 0).sum()
            errors.append(summed.to(loss.device))
        hidden = torch.stack(errors).sum() / taught.places
        loss = loss + distillation.hidden * hidden
        sums["hidden"] = hidden.detach()
    return {"loss": loss / items, **{name: sums[name] / items for name in distillation.parts}}


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
