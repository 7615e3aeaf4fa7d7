"""`surgeon.generate`: texts that go on from prompts, on one rank or several."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from surgeon.checkpoint.generation_defaults import Defaults, read_defaults
from surgeon.errors import shown
from surgeon.named import is_recipe
from surgeon.runtime.batching.request import Event, Sampling
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.ranks import early_ranks

if TYPE_CHECKING:
    from surgeon.library.generation import GeneratedText, Generation
    from surgeon.library.running import Running
    from surgeon.opened import EditedModel, Model


def generate(
    model: str | Path | Model | EditedModel,
    prompts: str | Sequence[str] | Mapping[str, str],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    max_batch: int = 32,
    pipeline: bool = False,
    on_event: Callable[[GeneratedText, Event], None] | None = None,
    **running: Unpack[Running],
) -> Generation:
    """Continue texts; they are the same for any number of ranks.

    Args:
        model: a checkpoint's folder, edited or not, a hub name, "demo", or a model that is open, edited
            (`surgeon.edit`) or not.
        prompts: one text, or several; a mapping's keys say in errors where each stands.
        max_new_tokens: to add to each at most.
        temperature: 0 takes the most likely token each time; this and what else chooses tokens is as of `Sampling`.
        repetition_penalty: by default the checkpoint's own (generation_config.json).
        seed: the same one draws the same texts again; each prompt has random numbers of its own, by its place.
        stop: texts that end what is written, and are no part of it.
        max_batch: texts that are computed together; others follow as these end.
        pipeline: as of `ServiceOptions`: ranks hold stretches of layers, one behind the other.
        on_event: called with a text so far and what is new of it, of one prompt after the other.
        running: ranks, program, dtype, decoding, low_rank, kv, halves, draft, draft_tokens: as of `Running`.

    Raises:
        FileNotFoundError, ValueError: if the model cannot be used or cannot run so, a number is out of its range, or a
            prompt is empty, too long, or not text, or there is none.
        RankFailed: if a rank fails.
    """
    prompts = _by_place(prompts)
    if not isinstance(model, str | Path) or is_recipe(model):  # open, or none at all, which is said here
        from surgeon.library.opening import stored_model
        from surgeon.opened import open_model

        model, running["program"] = stored_model(model, running.get("program"))
        model = open_model(model)
    defaults = read_defaults(model if isinstance(model, str | Path) else model.folder)
    chosen = defaults.applied() | ({} if repetition_penalty is None else {"repetition_penalty": repetition_penalty})
    sampling = Sampling(
        temperature, top_p, top_k, min_p, seed=seed, max_new_tokens=max_new_tokens, stop=tuple(stop), **chosen
    )
    _warn(sampling, defaults)
    ranks = running["ranks"] = RankOptions.of(running.get("ranks", 1))
    with early_ranks(ranks) as started:
        # These need `transformers`, and take as long to import as ranks take to start.
        from surgeon.library.generation import GeneratedText, Generation
        from surgeon.library.running import service_options
        from surgeon.opened import open_model
        from surgeon.runtime.plan.checks import make_plan
        from surgeon.runtime.service import Service

        opened, shared = open_model(model), 1 if pipeline else ranks.ranks
        tokens = _encode(opened, prompts, make_plan(opened, shared, None, running.get("program")).max_tokens)
        options = service_options(
            opened,
            running,
            max_batch=min(max_batch, len(tokens)),
            max_tokens=max(map(len, tokens)) + max_new_tokens,
            max_waiting=len(tokens),
            pipeline=pipeline,
        )
        with Service(opened, options, opened.tokenizer, started) as service:
            if service.capacity.texts(service.capacity.longest) < options.max_batch:
                print(service.capacity.line(), file=sys.stderr)  # some texts have to wait for others
            streams = [service.submit(ids, replace(sampling, place=(number, 0))) for number, ids in enumerate(tokens)]
            texts = [GeneratedText(prompt=prompt) for prompt in prompts.values()]
            for text, stream in zip(texts, streams, strict=True):
                for event in stream:
                    text.add(event)
                    if on_event is not None:
                        on_event(text, event)
            return Generation(tuple(texts), service.plan, ranks, service.figures(), options.draft is not None)


def _by_place(prompts: str | Sequence[str] | Mapping[str, str]) -> Mapping[str, str]:
    """The prompts, by what errors call the place of each."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if not prompts:
        raise ValueError("there is nothing to go on from; give at least one prompt")
    if not isinstance(prompts, Mapping):
        prompts = {f"prompt {number}": prompt for number, prompt in enumerate(prompts, start=1)}
    for place, prompt in prompts.items():
        if not isinstance(prompt, str):
            raise ValueError(f"{place}: a prompt is text, not {type(prompt).__name__} {shown(prompt)}")
    return prompts


def _warn(sampling: Sampling, defaults: Defaults) -> None:
    """Say what has no effect, and what the checkpoint asks for that is not done."""
    changed = [name for name in ("top_p", "top_k", "min_p") if getattr(sampling, name) != getattr(Sampling, name)]
    if not sampling.temperature and (idle := changed + (["seed"] if sampling.seed is not None else [])):
        warnings.warn(f"{', '.join(idle)}: of no effect without a temperature, which draws tokens", stacklevel=3)
    asked = {*changed, "do_sample", "temperature"} if sampling.temperature else set(changed)
    if complaint := defaults.complaint(asked):
        warnings.warn(complaint, stacklevel=3)


def _encode(model: Model, prompts: Mapping[str, str], most: int) -> list[list[int]]:
    """The token ids of the prompts, at most so many of each; an error says where a prompt stands, if there are more."""
    from surgeon.checkpoint.encoding import Encoder
    from surgeon.checkpoint.texts import encode

    encoder, found = Encoder(model.tokenizer), []
    for place, prompt in prompts.items():
        try:
            found.append(encode(encoder, prompt, most))
        except ValueError as error:
            raise (error if len(prompts) == 1 else ValueError(f"{place}: {error}")) from None
    return found
