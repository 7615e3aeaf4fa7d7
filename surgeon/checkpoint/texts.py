"""Tokenizers: from text, or messages of a chat, to token ids and back; and a checkpoint's defaults for choosing tokens.

generation_config.json applies where nobody asks for something else, as in `transformers`. Sampling is left to the
caller: commands default to the most likely tokens, the server to a temperature of 1, as OpenAI has it.

One message can be written in several ways, of which a chat template reads one: contents are texts or lists of parts; an
answer that calls tools has no content, an empty one, or null; the arguments of a call are an object (in transformers'
own templates) or its JSON (in OpenAI's API, and DeepSeek's templates).
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import product, takewhile
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from surgeon.checkpoint.belongings import GENERATION, FileKind, kind_of
from surgeon.checkpoint.config import locate, open_stored
from surgeon.checkpoint.stored import StoredModel
from surgeon.checkpoint.tensor_file import read_json
from surgeon.words import first_few, first_line, show_value

# Texts beyond are tokenized one at a time, so that they do not fill the memory together.
LONG_CHARACTERS = 1 << 17
CANONICAL = 4  # code points that become one at most as texts are normalised


class Encoder:
    """A `transformers` tokenizer that several threads may use."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        tokenizer("a")  # which forgets the truncation and padding that its file may ask for
        self._fast = bool(tokenizer.is_fast)
        self._lock = threading.Lock()  # of a tokenizer in Python, about which nobody knows
        self._long = threading.Lock()
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)

    def most_characters(self, tokens: int) -> int:
        """Return the most characters that so many tokens can stand for."""
        return CANONICAL * self._longest * tokens

    def __call__(self, text: str, special: bool = True) -> list[int]:
        """Tokenize a text.

        Args:
            special: whether to add the tokens that the model's texts begin and end with.
        """
        alone: AbstractContextManager[object] = (
            self._long if len(text) > LONG_CHARACTERS else nullcontext()
        )
        with alone:
            if self._fast:
                # The only call that leaves other threads running, and it keeps no places of tokens.
                batch = self.tokenizer.backend_tokenizer.encode_batch_fast(
                    [text], add_special_tokens=special
                )
                ids: list[int] = batch[0].ids
                return ids
            with self._lock:
                return list(self.tokenizer(text, add_special_tokens=special).input_ids)


# Earlier tokens decoded with the new ones, because tokenizers write a text's first token differently.
CONTEXT = 16
MOST_CONTEXT = 4 * CONTEXT
MOST_NAMED = 3  # tokens in an error message
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NAME_TOKENS = (".json", ".jinja", ".txt", ".model")  # files that may
UNFINISHED = "\ufffd"  # what a token decodes to that holds a part of a character


def open_tokenizer(model: str | Path | StoredModel) -> Any:
    """Open a model's tokenizer, every token of which has a row in the model's embedding.

    An embedding of more rows is as good, and so is a tokenizer without BOS, EOS or a fast version. Special tokens
    without a row are left out where only the tokenizer's class adds them. Special ids in the configuration, which end a
    text, give a warning without a row.
    """
    stored = open_stored(model)
    tokenizer = read_tokenizer(stored.folder)
    rows = stored.embedding.shape[0]
    if tokenizer.is_fast and rows_needed(tokenizer) > rows:
        # Tokens without a row that a class of transformers has added and no file names are dropped.
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        added = described.pop("added_tokens")
        texts = [
            path.read_text(errors="replace")
            for path in stored.folder.iterdir()
            if path.suffix in _NAME_TOKENS
        ]
        texts.append(json.dumps(described, ensure_ascii=False))
        spare = {
            text
            for text in (one["content"] for one in added if one["id"] >= rows)
            if not any(text in each or json.dumps(text)[1:-1] in each for each in texts)
        }
        if spare:
            described["added_tokens"] = [one for one in added if one["content"] not in spare]
            for name, text in tokenizer.special_tokens_map.items():
                if text in spare:
                    setattr(tokenizer, name, None)
            tokenizer._tokenizer = Tokenizer.from_str(json.dumps(described))
    if (needed := rows_needed(tokenizer)) > rows:
        without = sorted((token, text) for text, token in tokenizer.get_vocab().items() if token >= rows)
        named = first_few([f"{text!r} ({token})" for token, text in without], MOST_NAMED)
        raise ValueError(
            f"the tokenizer of {stored.name} gives token ids up to {needed - 1:,}, and the model's embedding has "
            f"{rows:,} rows, none for {named}; give it rows (model.resize_token_embeddings({needed}) of "
            "transformers, and save it), or take these tokens out of the tokenizer's files, of which "
            "tokenizer_config.json names the special ones"
        )
    beyond = []  # special tokens that the model's configurations name
    for file in (stored.folder / "config.json", stored.folder / GENERATION):
        held = read_json(file) if file.is_file() else {}
        for name in SPECIAL_IDS:
            value = held.get(name)
            ids = value if isinstance(value, list) else [value]
            beyond += [
                f"{name} {token:,} ({file.name})"
                for token in ids
                if type(token) is int and token >= rows
            ]
    if beyond:
        warnings.warn(
            f"{stored.name} names tokens beyond the {rows:,} rows of its embedding, which cannot come: "
            f"{', '.join(beyond)}; correct the numbers there",
            stacklevel=2,
        )
    return tokenizer


def rows_needed(tokenizer: Any) -> int:
    """Return the rows that an embedding needs for a tokenizer's ids."""
    return 1 + int(max(tokenizer.get_vocab().values(), default=-1))


def read_tokenizer(path_or_name: str | Path) -> Any:
    """Read the tokenizer in a folder, whatever model there is beside it, if any."""
    folder = locate(path_or_name)
    try:
        # Of a checkpoint with a modeling file, transformers would read the configuration by running it.
        path = folder / "config.json"
        config = None
        if path.exists() and "auto_map" in read_json(path):
            config = open_stored(folder).config
        return AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
    except Exception as error:
        reason = first_line(error)
        if not any(kind_of(path.name) == FileKind.TOKENIZER for path in folder.glob("*.*")):
            reason = "it has no file of one"
        raise ValueError(
            f"{folder} has no tokenizer that can be read ({reason}); copy the original model's tokenizer files into it"
        ) from error


def encode(encoder: Encoder, prompt: str, most: int, special: bool = True) -> list[int]:
    """Tokenize a prompt."""
    if len(prompt) > (characters := encoder.most_characters(most)):
        raise ValueError(
            f"the prompt has {len(prompt)} characters; at most {characters} are read, as the model has {most} "
            "positions; shorten it"
        )
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not text in UTF-8 (at character {error.start})") from error
    tokens = encoder(prompt, special)
    if not tokens:
        raise ValueError("the prompt is empty: it has no tokens; give at least one character")
    return tokens


class Continuation:
    """Turns new tokens into pieces of text, whose sum follows the prompt.

    Attributes:
        begins: where in that sum the newest token's character begins; an end token's, where it stands.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.tokens = list(prompt[-CONTEXT:])
        self.begins = 0
        self._newest = self._text(self.tokens)
        self._returned = 0
        self.written = len(self._newest)

    def _text(self, tokens: list[int]) -> str:
        # Cleaning up would change text that has been written already.
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def add(self, token: int) -> str:
        """Return the text that one more token adds; empty while a character is unfinished."""
        self.tokens.append(token)
        before = self._newest
        text = self._text(self.tokens)
        self._newest = text
        # However many characters are unfinished, they may become a single one.
        same = takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False))
        place = min(len(list(same)), len(text.rstrip(UNFINISHED)))
        self.begins = self._returned + max(0, place - self.written)
        if text.endswith(UNFINISHED):
            return ""
        piece = self._rest_of(text)
        if len(self.tokens) > MOST_CONTEXT:
            # Tokens of long ago are dropped, so that the next ones do not take ever longer; only where the rest gives
            # the same text: it might start within a character, which would spoil what follows.
            late = self.tokens[-CONTEXT:]
            rest = self._text(late)
            if text.endswith(rest) and UNFINISHED not in rest:
                self.tokens = late
                self.written = len(rest)
                self._newest = rest
        return piece

    def _rest_of(self, text: str) -> str:
        """Return the end of a text that has not been returned."""
        piece = text[self.written :]
        self.written = len(text)
        self._returned += len(piece)
        return piece

    def rest(self) -> str:
        """Return the text not returned yet."""
        return self._rest_of(self._newest)


@dataclass
class StopTexts:
    """Finds the first of some texts in another that comes in pieces, and keeps back a possible start of one.

    Attributes:
        found: whether one has come.
    """

    stops: Sequence[str]
    found: bool = False
    _kept: str = ""

    def add(self, piece: str) -> str:
        """Return the text that can be shown after one more piece: nothing from a (possible) stop text on."""
        if self.found:
            return ""
        text = self._kept + piece
        places = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if places:
            self.found = True
            self._kept = ""
            return text[: min(places)]
        begun = (
            stop[:length] for stop in self.stops for length in range(1, min(len(stop), len(text) + 1))
        )
        self._kept = max((start for start in begun if text.endswith(start)), key=len, default="")
        return text.removesuffix(self._kept)

    def rest(self) -> str:
        """Return the text kept back, at the end of all text."""
        kept = self._kept
        self._kept = ""
        return kept


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
    """A checkpoint's settings for choosing tokens.

    Attributes:
        repetition_penalty, suppress_tokens, begin_suppress_tokens: as `Sampling` has them.
        unapplied: further settings that would change the text, with their values.
        source: the name of their file.
    """

    repetition_penalty: float = 1.0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    unapplied: tuple[tuple[str, Any], ...] = ()
    source: str = GENERATION

    def sampling_fields(self) -> dict[str, Any]:
        """Return them as fields of `Sampling`."""
        names = ("repetition_penalty", "suppress_tokens", "begin_suppress_tokens")
        return {name: getattr(self, name) for name in names}

    def complaint(self, overridden: Container[str] = ()) -> str | None:
        """Say which settings are not applied; None if there are none.

        Args:
            overridden: the names of settings that the caller sets.
        """
        named = [
            f"{name} ({json.dumps(value)})" for name, value in self.unapplied if name not in overridden
        ]
        if named:
            return f"{self.source} sets {', '.join(named)}, which is not applied"
        return None


def read_defaults(path_or_name: str | Path) -> Defaults:
    """Read a checkpoint folder's generation_config.json; without one, nothing is set."""
    folder = locate(path_or_name)
    # Checkpoints from before there was such a file have them in their configuration, where transformers looks, too.
    file = next(
        (folder / name for name in (GENERATION, "config.json") if (folder / name).is_file()), None
    )
    if file is None:
        return Defaults()
    found = read_json(file)
    penalty = found.get("repetition_penalty")
    penalty = 1.0 if penalty is None else penalty
    if (
        isinstance(penalty, bool)
        or not isinstance(penalty, int | float)
        or not 0 < penalty < float("inf")
    ):
        raise ValueError(
            f"{file}: repetition_penalty must be a number above 0, not {penalty!r}; correct it there"
        )
    unapplied = _differences(found, _UNAPPLIED)
    if found.get("do_sample"):
        unapplied += _differences(found, _UNAPPLIED_DRAWING)
    lists: dict[str, tuple[int, ...]] = {}
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        tokens = found.get(name) or []
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ValueError(
                f"{file}: {name} must be a list of token ids, not {tokens!r:.60}; correct it there"
            )
        lists[name] = tuple(tokens)
    return Defaults(float(penalty), **lists, unapplied=unapplied, source=file.name)


def _differences(
    found: dict[str, Any], neutral: dict[str, tuple[Any, ...]]
) -> tuple[tuple[str, Any], ...]:
    values = ((name, found.get(name)) for name in neutral)
    return tuple(
        (name, value) for name, value in values if value is not None and value not in neutral[name]
    )


# What chat templates raise about messages that they do not take.
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

Message = dict[str, Any]


def plain_message(message: Message, name: str) -> Message:
    """Return a message whose content is one text, without empty entries.

    Args:
        name: of the message, for errors.
    """
    if not isinstance(message.get("role"), str):
        raise ValueError(
            f'{name}.role must be a text such as "user", not {show_value(message.get("role"))}'
        )
    calls = message.get("tool_calls")
    content = message.get("content")
    if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise ValueError(f"{name}.tool_calls must be a list of objects, not {show_value(calls)}")
    if isinstance(content, list):
        content = "".join(_part(part, f"{name}.content.{number}") for number, part in enumerate(content))
    elif content is None and calls and message["role"] == "assistant":
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"{name}.content must be a text or a list of parts, not {show_value(content)}")
    plain = {
        key: value
        for key, value in message.items()
        if value is not None and (key != "tool_calls" or value)
    }
    return plain | {"content": content}


def _part(part: Any, name: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ValueError(f'{name} must be {{"type": "text", "text": ...}}, not {show_value(part)}')


def begin_conversation(system: str | None) -> list[Message]:
    """Return the beginning of a conversation: a system message, or nothing."""
    if system is None:
        return []
    return [{"role": "system", "content": system}]


def chat_text(
    tokenizer: Any,
    messages: list[Message],
    name: str = "the model",
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Write plain messages in a tokenizer's chat template, up to where the next answer begins.

    The template writes special tokens, the BOS among them; the text is to be tokenized without any more.

    Args:
        name: of the model, for errors.
        variables: of the template, such as enable_thinking.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"{name} has no chat template, which says how its chats are written; put a chat_template.jinja beside its "
            "tokenizer, that of its chat version, say, or have it go on from text (surgeon generate without --chat)"
        )

    def write(form: list[Message]) -> str:
        options = {"add_generation_prompt": True, "tokenize": False, **(variables or {})}
        return str(tokenizer.apply_chat_template(form, **options))

    has_system = messages[0]["role"] == "system" and bool(messages[0]["content"])
    try:
        text = write(with_calls_written(write, messages))
    except REFUSALS as error:
        what = " with ".join(["these messages", *(variables or ())])
        if has_system:
            with suppress(*REFUSALS):
                write(messages[1:])
                what = "a system message, which has to be left out"
        raise ValueError(f"{name}'s chat template does not take {what}: {first_line(error)}") from error
    if has_system and len(messages) > 1 and not differs(write, messages[1:], text):
        raise ValueError(f"{name}'s chat template writes nothing of a system message; leave it out")
    return text


def with_calls_written(write: Callable[[list[Message]], str], messages: list[Message]) -> list[Message]:
    """Return plain messages in the first form whose calls of tools a template takes and writes.

    Args:
        write: puts messages into the template.
    """
    if not any("tool_calls" in message for message in messages):
        return messages
    refusal: Exception | None = None
    is_taken = False
    for empty, as_text in product(("", None), (False, True)):
        form = [
            message
            if "tool_calls" not in message
            else message
            | {"content": message["content"] or empty}
            | {"tool_calls": [_read_call(call, as_text) for call in message["tool_calls"]]}
            for message in messages
        ]
        try:
            text = write(form)
        except REFUSALS as error:
            refusal = refusal or error
            continue
        is_taken = True
        if differs(write, without_keys(form, "tool_calls"), text):
            return form
    if refusal is not None and not is_taken:
        raise refusal
    raise ValueError("it leaves out tool_calls; take another template, or leave out such messages")


def differs(write: Callable[[list[Message]], str], messages: list[Message], text: str) -> bool:
    """Tell whether a template writes another text for some messages, or does not take them."""
    try:
        return write(messages) != text
    except REFUSALS:
        return True


def without_keys(messages: list[Message], *keys: str) -> list[Message]:
    """Remove some keys of messages."""
    return [{key: value for key, value in message.items() if key not in keys} for message in messages]


def _read_call(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """Write a call of a tool, whose function stands in it, or is it; its arguments as JSON, or as an object."""
    if isinstance(function := call.get("function"), dict):
        return call | {"function": _read_call(function, as_text)}
    arguments = call.get("arguments")
    if arguments is None:
        return call
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        with suppress(ValueError):  # a template may write it as it is
            arguments = json.loads(arguments or "{}")
    return call | {"arguments": arguments}
