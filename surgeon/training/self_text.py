"""Text that an edited model's original writes itself, to heal it on where there is no other.

Texts are numbered, and each is drawn with random numbers of its own, by seed and number, so that a resumed run draws
the missing ones alike. Every second one is a conversation where the tokenizer has a chat template: the model writes the
user's turn behind the template's beginning, and then answers.

FOLDER/texts.jsonl   identity, then each text with its tokens, by number
FOLDER/HASH/         their windows (`surgeon.training.token_store`)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray

from surgeon.checkpoint.texts import Encoder, chat_text
from surgeon.opened import EditedModel
from surgeon.processes.journal import Journal
from surgeon.processes.torchrun import beside_torchrun
from surgeon.quality.data import Tokens, tokenizer_digest
from surgeon.quality.sources import Reading
from surgeon.runtime.batching.request import Sampling
from surgeon.runtime.service import Answer, Service, ServiceOptions, Stream
from surgeon.runtime.worker.rank import RankOptions
from surgeon.training.token_store import SELF, Documents, TextSource

TEXTS_FILE = "texts.jsonl"
_SIDE_BY_SIDE = {"cpu": 16, "cuda": 128}  # texts that are written together, and kept together
_MARK = "surgeon:turn"  # in place of a user's turn
_FORMAT = 1


class SelfText(TextSource):
    """Text of the original's own, written as far as windows of it are asked for.

    Args:
        original: the model, as it is stored.
        tokenizer: its own, or one with another chat template.
        window: tokens of the longest text.
        folder: of texts and windows.
        temperature: that tokens are drawn at; 1 is the model's own distribution.
        device: "cpu" or "cuda", where it writes.

    Raises:
        ValueError: if the original is a recipe, a number makes no sense, there is no token to begin from, or the chat
            template cannot be used.
    """

    endless = True

    def __init__(
        self,
        original: EditedModel,
        tokenizer: Any,
        window: int,
        folder: Path,
        documents: Documents = "joined",
        *,
        seed: int = 0,
        temperature: float = 1.0,
        device: str = "cpu",
    ) -> None:
        super().__init__(tokenizer, SELF, window, documents)
        if original.recipe is not None:
            raise ValueError(
                f"{original.name} is a recipe, and text is written by a model as it is stored; export it, and give the "
                "folder as the teacher"
            )
        if not temperature > 0:
            raise ValueError(
                f"the temperature of text that the original writes must be above 0, not {temperature:g}: with 0 all "
                "texts would be the same"
            )
        self.original = original
        self.folder = folder
        self.device = device
        self.sampling = Sampling(temperature, seed=seed)
        self.written: dict[str, int] = {}  # of all that is kept: texts, conversations, tokens
        self._new = 0
        self._seconds = 0.0
        self._wanted = 0
        starts = (
            tokenizer.bos_token_id,
            getattr(original.model.config, "bos_token_id", None),
            tokenizer.eos_token_id,
        )
        start = next((token for token in starts if token is not None), None)
        if start is None:
            raise ValueError(
                f"{original.name} has neither BOS nor EOS, from which it could write a text; give one to heal on"
            )
        self._start = int(start)
        # Tokens that the chat template puts before a user's first turn, and behind it up to the answer.
        self._before = list[int]()
        self._behind = list[int]()
        if tokenizer.chat_template:
            turn = [{"role": "user", "content": _MARK}]
            text = chat_text(tokenizer, turn, "the model that writes text")
            before, mark, behind = text.partition(_MARK)
            encoder = Encoder(tokenizer)
            self._before = encoder(before, special=False)
            self._behind = encoder(behind, special=False)
            if not (mark and self._before and self._behind) or _MARK in behind:
                raise ValueError(
                    "the chat template does not put something before a user's turn and behind it, so that no "
                    "conversation can be made up; give another one"
                )
        self._room = window - len(self._before) - len(self._behind)  # for a turn and its answer
        if self._before and self._room < 2:
            raise ValueError(
                f"a window of {window} tokens has no room for a turn in the chat template, which takes "
                f"{len(self._before) + len(self._behind)} tokens itself; use a larger window"
            )

    def follows(self) -> dict[str, Any]:
        """Identity of the texts, as JSON values; weights are read for their hash."""
        return {
            "format": _FORMAT,
            "model_hash": self.original.model.hash,
            "seed": self.sampling.seed,
            "temperature": self.sampling.temperature,
            "window": self.window,
            "start": self._start,
            "turn": [self._before, self._behind],
            "tokenizer": tokenizer_digest(self.tokenizer),
        }

    def identity(self) -> dict[str, Any]:
        return super().identity() | self.follows()

    def record(self) -> dict[str, Any]:
        names = "model_hash", "seed", "temperature", "start"
        return {name: value for name, value in self.follows().items() if name in names} | self.written

    def line(self) -> str:
        written = self.written
        begun = written["texts"] - written["conversations"]
        start = self.tokenizer.convert_ids_to_tokens(self._start)
        what = f"{begun:,} texts from {start}"
        if self._before:
            what += f" and {written['conversations']:,} conversations"
        now = ""
        if self._new:
            now = f", {self._new:,} now in {self._seconds:.1f} s ({self._new / self._seconds:.1f} tokens/s)"
        return f"{self.original.name} wrote {what}, {written['tokens']:,} tokens{now}, in {self.folder / TEXTS_FILE}"

    def windows(self, count: int) -> tuple[datasets.Dataset, dict[str, Any]]:
        """Read or write so many windows in the folder.

        Raises:
            OSError: if there is no room, or another run is writing there.
            ValueError: if the model cannot write, or the folder has text that follows from something else.
            RankFailed: if the process that writes fails.
        """
        self._wanted = count * self.window
        rows, facts = super().windows(count)
        self.written = facts["written"]
        return rows, facts

    def _write(self, path: Path, count: int) -> dict[str, Any]:
        return super()._write(path, count) | {"written": self.written}

    def tokens(self, reading: Reading) -> Iterator[list[Tokens]]:  # noqa: ARG002 - nothing is left out
        """Yield the kept texts, and then new ones, without end."""
        self.written = {"texts": 0, "conversations": 0, "tokens": 0}
        with _KeptTexts(self.folder / TEXTS_FILE, self.follows()) as kept:
            for ids in kept.texts:
                yield [self._count(ids)]
            side_by_side = _SIDE_BY_SIDE[self.device]
            with beside_torchrun():
                ranks = RankOptions(1, self.device)
                options = ServiceOptions(
                    ranks, self.original.asked, max_batch=side_by_side, max_tokens=self.window
                )
                service = Service(self.original.model, options)
            with service:
                while True:
                    begun = time.monotonic()
                    first = len(kept.texts)
                    missing = max(1, math.ceil((self._wanted - self.written["tokens"]) / self.window))
                    texts = self._texts(service, range(first, first + min(side_by_side, missing)))
                    self._seconds += time.monotonic() - begun
                    self._new += sum(map(len, texts))
                    lines = [{"tokens": ids, "text": self.tokenizer.decode(ids)} for ids in texts]
                    kept.append(*lines)
                    for line in lines:
                        kept.take(line)
                        yield [self._count(kept.texts[-1])]

    def _count(self, ids: NDArray[np.int32]) -> Tokens:
        self.written["conversations"] += self._is_conversation(self.written["texts"])
        self.written["texts"] += 1
        self.written["tokens"] += len(ids)
        return Tokens(ids)

    def _is_conversation(self, number: int) -> bool:
        return bool(self._before) and number % 2 == 1

    def _texts(self, service: Service, numbers: range) -> list[list[int]]:
        """Write the texts of these numbers, each with its beginning."""
        ends = service.plan.ends

        def ask(
            place: tuple[int, int], prompt: list[int], most: int, never_first: Sequence[int]
        ) -> Stream:
            sampling = replace(
                self.sampling, max_new_tokens=most, place=place, begin_suppress_tokens=tuple(never_first)
            )
            return service.submit(prompt, sampling)

        turn_ends = {*ends, *self._behind[:1]}
        streams = {
            number: ask((number, 0), self._before, self._room // 2, [*turn_ends])
            if self._is_conversation(number)
            else ask((number, 0), [self._start], self.window - 1, ends)
            for number in numbers
        }
        prompts = {number: [self._start] for number in numbers}
        for number in filter(self._is_conversation, numbers):
            turn = takewhile(lambda token: token not in turn_ends, _read_tokens(streams[number]))
            prompts[number] = [*self._before, *turn, *self._behind]
            room = self.window - len(prompts[number])
            streams[number] = ask((number, 1), prompts[number], room, ends)
        found = [prompts[number] + _read_tokens(streams[number]) for number in numbers]
        # Where what begins a text is also what ends one, the next text has it.
        return [ids[:-1] if ids[-1] == self._start else ids for ids in found]


class _KeptTexts(Journal):
    def __init__(self, path: Path, follows: dict[str, Any]) -> None:
        self.texts = list[NDArray[np.int32]]()
        super().__init__(path, "self-text", follows)

    def take(self, line: Any) -> None:
        self.texts.append(np.array(line["tokens"], np.int32))


def _read_tokens(stream: Stream) -> list[int]:
    answer = Answer()
    for event in stream:
        answer.add(event)
    return answer.tokens
