"""What a checkpoint's generation_config.json says of how its text is chosen: what of it applies here, and what not.

It applies where nobody asks for something else, as in `transformers`. Whether to sample, and how, is left to those who
ask: the most likely tokens are the default of commands, and a temperature of 1 that of the server, as OpenAI has it.
"""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.checkpoint.belongings import GENERATION
from surgeon.checkpoint.locate import locate
from surgeon.checkpoint.read import read_json

# Settings that change the text and are not applied, and the values with which they change nothing.
_UNAPPLIED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ([], {}),
    "stop_strings": ([],),
    "token_healing": (False,),
    "watermarking_config": (),
}
# The same of those that count only when tokens are drawn.
_UNAPPLIED_DRAWING: dict[str, tuple[Any, ...]] = {
    "do_sample": (False,),
    "temperature": (1,),
    "top_k": (0,),
    "top_p": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}


@dataclass(frozen=True)
class Defaults:
    """How a checkpoint wants its tokens chosen.

    Attributes:
        repetition_penalty, suppress_tokens, begin_suppress_tokens: as `Sampling` has them.
        unapplied: further settings that would change the text, with their values.
        source: the name of the file that says so.
    """

    repetition_penalty: float = 1.0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    unapplied: tuple[tuple[str, Any], ...] = ()
    source: str = GENERATION

    def applied(self) -> dict[str, Any]:
        """What applies where nobody asks for something else, as fields of `Sampling`."""
        names = ("repetition_penalty", "suppress_tokens", "begin_suppress_tokens")
        return {name: getattr(self, name) for name in names}

    def complaint(self, overridden: Container[str] = ()) -> str | None:
        """What to tell the user of settings that are not applied; None if there are none.

        Args:
            overridden: the names of settings that were asked for otherwise.
        """
        named = [f"{name} ({json.dumps(value)})" for name, value in self.unapplied if name not in overridden]
        if named:
            return f"{self.source} sets {', '.join(named)}, which is not applied"
        return None


def read_defaults(path_or_name: str | Path) -> Defaults:
    """What a checkpoint folder's generation_config.json says; nothing if there is none.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if a setting has a value that it cannot have.
    """
    folder = locate(path_or_name)
    # Checkpoints from before there was such a file have them in their configuration, where transformers looks, too.
    file = next((folder / name for name in (GENERATION, "config.json") if (folder / name).is_file()), None)
    if file is None:
        return Defaults()
    found = read_json(file)
    penalty = found.get("repetition_penalty")
    penalty = 1.0 if penalty is None else penalty
    if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not 0 < penalty < float("inf"):
        raise ValueError(f"{file}: repetition_penalty must be a number above 0, not {penalty!r}; correct it there")
    unapplied = _changing(found, _UNAPPLIED)
    if found.get("do_sample"):
        unapplied += _changing(found, _UNAPPLIED_DRAWING)
    suppressed, at_first = (_tokens(file, found, name) for name in ("suppress_tokens", "begin_suppress_tokens"))
    return Defaults(float(penalty), suppressed, at_first, unapplied, file.name)


def _changing(found: dict[str, Any], neutral: dict[str, tuple[Any, ...]]) -> tuple[tuple[str, Any], ...]:
    values = ((name, found.get(name)) for name in neutral)
    return tuple((name, value) for name, value in values if value is not None and value not in neutral[name])


def _tokens(file: Path, found: dict[str, Any], name: str) -> tuple[int, ...]:
    tokens = found.get(name) or []
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ValueError(f"{file}: {name} must be a list of token ids, not {tokens!r:.60}; correct it there")
    return tuple(tokens)
