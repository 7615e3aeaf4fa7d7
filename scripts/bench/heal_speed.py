"""What healing takes beside plain fine-tuning: transformers' Trainer as it is, on the unedited model and the same data.

    python scripts/bench/heal_speed.py [--ways all,edited,...] [--rounds N] [--steps N] [--clock wall|cpu]
    python scripts/bench/heal_speed.py --memory

A random Llama of 8 layers whose upper four are two pairs. Each way is trained for some steps by surgeon and by the
Trainer in turns, and a round has every way once. The first step is left out of the time; what counts is from the
beginning of the second one to the end of the last, data, logs and the optimiser's step included. A ratio is the
Trainer's time over surgeon's, so that above 1 surgeon is the faster one; printed are medians over rounds, with the
least and the highest.

    all             every weight, on the text
    edited          weights of the pairs; the Trainer trains those of the same layers
    lora            adapters of rank 8 on them; the Trainer's by peft
    distilled       weights of the pairs towards the original's predictions; the Trainer has both models' logits whole,
                    and PyTorch's divergence
    distilled-all   the same with every weight
    shared          distilled by surgeon, in the Trainer's place without what is computed once for both models

--memory prints the peak of memory of one step with a vocabulary of 128,000, each by a process of its own, less what it
is before the step. --clock cpu counts seconds of processors, on a machine that does other things, too.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from surgeon.models.edit import edit
from surgeon.quality.data import Windows, digest_of
from surgeon.training.distiller import Distillation, Distiller
from surgeon.training.run import train
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainingText, TrainTexts

LAYERS, FIRST = 8, 4  # in all, and of those that are paired
PROGRAM = "A0 F0 A1 F1 A2 F2 A3 F3 [A4 A5] [F4 F5] [A6 A7] [F6 F7]"
WAYS = ("all", "edited", "lora", "distilled", "distilled-all", "shared")
LARGE = 128_000  # tokens of a vocabulary
RANK = 8


class Clock(TrainerCallback):
    """Takes the time of every Trainer's steps but the first."""

    now: ClassVar[Callable[[], float]] = time.perf_counter
    begun: ClassVar[float] = 0.0
    taken: ClassVar[float] = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == 1:
            Clock.begun = Clock.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        Clock.taken = Clock.now() - Clock.begun


class PlainDistillation(Trainer):
    """As one writes it."""

    teacher: nn.Module

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1).log_softmax(-1)
        found = model(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1).log_softmax(-1)
        return functional.kl_div(found, wanted, reduction="batchmean", log_target=True)


class Bench:
    """A model and its text."""

    def __init__(self, arguments: argparse.Namespace, vocabulary: int) -> None:
        self.steps, self.batch = arguments.steps + 1, arguments.batch
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=arguments.hidden,
            intermediate_size=arguments.hidden * 11 // 4,
            num_hidden_layers=LAYERS,
            num_attention_heads=arguments.hidden // 64,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)
        ids = torch.randint(vocabulary, (self.batch * self.steps, arguments.window))
        held_out = Windows(ids[:1, :16], "random", "")
        self.texts = TrainTexts(TrainingText.of(Windows(ids, "random", digest_of(ids))), held_out)

    def heal(self, way: str) -> None:
        """By surgeon, nothing measured but once before, and once after."""
        distilled = way.startswith("distilled")
        settings = TrainSettings(
            scope="all" if way.endswith("all") else "edited",
            lora=RANK if way == "lora" else None,
            distillation=Distillation() if distilled else None,
            steps=self.steps,
            batch=self.batch,
            evaluate_every=self.steps,
            save_every=self.steps,
        )
        original = partial(copy.deepcopy, self.model)
        with TemporaryDirectory() as folder:
            student = edit(copy.deepcopy(self.model), PROGRAM)
            train(student, self.texts, settings, Path(folder) / "run", original if distilled else None)

    def plainly(self, way: str) -> None:
        """By the Trainer."""
        model: Any = copy.deepcopy(self.model)
        if way == "lora":
            from peft import LoraConfig, get_peft_model

            names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            layers = list(range(FIRST, LAYERS))
            adapters = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=names, layers_to_transform=layers)
            model = get_peft_model(model, adapters)
        elif not way.endswith("all"):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(any(f"layers.{layer}." in name for layer in range(FIRST, LAYERS)))
        with TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=self.steps,
                per_device_train_batch_size=self.batch,
                learning_rate=1e-4,
                logging_steps=10,
                report_to=[],
                disable_tqdm=True,
                save_strategy="no",
                use_cpu=True,
                dataloader_pin_memory=False,
            )
            rows: Any = [{"input_ids": ids, "labels": ids} for ids in self.texts.training.ids]
            one = (PlainDistillation if way.startswith("distilled") else Trainer)(model, arguments, train_dataset=rows)
            if isinstance(one, PlainDistillation):
                one.teacher = copy.deepcopy(self.model).eval().requires_grad_(False)
            one.train()

    def pair(self, way: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """What is compared: surgeon's and the other."""
        if way != "shared":
            return partial(self.heal, way), partial(self.plainly, way)

        def apart() -> None:
            with mock.patch.object(Distiller, "share"):
                self.heal("distilled")

        return partial(self.heal, "distilled"), apart


def timed(run: Callable[[], None]) -> float:
    """The seconds of its steps."""
    run()
    return Clock.taken


def compare(arguments: argparse.Namespace) -> None:
    """The table of ratios."""
    trainer.DEFAULT_CALLBACKS.append(Clock)
    Clock.now = time.process_time if arguments.clock == "cpu" else time.perf_counter
    bench, taken = Bench(arguments, arguments.vocabulary), {way: list[tuple[float, float]]() for way in arguments.ways}
    for number in range(arguments.rounds):
        for way in arguments.ways:
            ours, other = bench.pair(way)
            if number % 2:  # who comes second finds warmer caches, or a hotter processor
                theirs = timed(other)
                taken[way].append((timed(ours), theirs))
            else:
                taken[way].append((timed(ours), timed(other)))
    tokens = arguments.steps * arguments.batch * arguments.window
    print("| | surgeon, tokens/s | the other, tokens/s | ratio |\n|:--|--:|--:|--:|")
    for way, both in taken.items():
        own, theirs = (tokens / median(each) for each in zip(*both, strict=True))
        ratios = sorted(other / mine for mine, other in both)
        print(f"| {way} | {own:.0f} | {theirs:.0f} | {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |")


def _peak(arguments: argparse.Namespace, way: str, plain: bool, found: Any) -> None:
    bench = Bench(arguments, LARGE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bench.plainly(way) if plain else bench.heal(way)
    found.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def memory(arguments: argparse.Namespace) -> None:
    """The table of peaks."""
    arguments.steps = 0
    spawned = multiprocessing.get_context("spawn")
    logits = arguments.batch * arguments.window * LARGE * 4 / 2**20
    print(f"logits of a step: {logits:.0f} MB\n\n| | surgeon, MB | Trainer, MB |\n|:--|--:|--:|")
    for way in ("all", "edited", "distilled"):
        peaks = []
        for plain in (False, True):
            queue = spawned.Queue()
            child = spawned.Process(target=_peak, args=(arguments, way, plain, queue))
            child.start()
            peaks.append(queue.get())
            child.join()
        print(f"| {way} | {peaks[0]:.0f} | {peaks[1]:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="that are timed")
    parser.add_argument("--batch", type=int, default=4, help="windows in a step")
    parser.add_argument("--window", type=int, default=256, help="tokens in a window")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--vocabulary", type=int, default=16_000)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    (memory if arguments.memory else compare)(arguments)


if __name__ == "__main__":
    main()
