"""Rows of conversations as tokens, of which a model is trained on those of its answers.

Where a chat template marks answers ({% generation %}), its marks are taken. Otherwise an answer is the text that the
whole conversation shares with the conversation ending in that answer, behind the generation prompt: a model is only
trained on text that it would have read and written there. Answers that a template rewrites later (Qwen3 removes
reasoning) have no such text. A token across the border of prompt and answer counts as the answer's.

Every key of a row is used, or counted as left out, or the row is refused.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from surgeon.checkpoint.texts import (
    REFUSALS,
    Message,
    differs,
    plain_message,
    with_calls_written,
    without_keys,
)
from surgeon.quality.data import Tokens, count_alike
from surgeon.quality.sources import Reading, Row, open_rows, require_utf8
from surgeon.words import first_line, plural, show_value

_COLUMNS = (("messages",), ("conversations",), ("prompt", "completion"), ("prompt", "chosen"))
_PREFERENCES = ("chosen", "rejected")  # lists of messages; the former is used
_SYSTEM = ("system", "system_prompt", "system_message")  # columns beside messages
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
_ROLES |= {"human": "user", "gpt": "assistant"}  # as ShareGPT has them
_MARK = re.compile(r"{%-?\s*generation\s*-?%}")
_OF_MESSAGES = ("role", "content", "tool_calls")


def conversation_columns(row: Row) -> tuple[str, ...]:
    """Find the columns of a row that hold a conversation (docs/training-text.md); () if none."""
    for columns in _COLUMNS:
        if row.keys() >= set(columns):
            return columns
    if all(isinstance(row.get(name), list) for name in _PREFERENCES):
        return _PREFERENCES[:1]
    return ()


def read_conversations(
    tokenizer: Any, data: str, longest: int, reading: Reading | None = None
) -> Iterator[Tokens] | None:
    """Stream the conversations of a table or a dataset; None for other data, which is read as text.

    The first row decides, or the named column, if it holds a list.

    Args:
        data: as `surgeon.quality.data.load_windows` takes it.
        longest, tokenizer, reading: as `ConversationTokenizer` has them.

    Raises:
        FileNotFoundError: if there is no such file or dataset.
        ValueError: as `ConversationTokenizer`; or if a row is damaged, or no row has an answer to train on.
    """
    reading = reading or Reading()
    table = open_rows(data, reading)
    if table is None:
        return None
    first = next(table.rows, None)
    if first is None:
        return None
    columns = conversation_columns(first[1])
    if table.column is not None:
        columns = (table.column,) if isinstance(first[1].get(table.column), list) else ()
    if not columns:
        return None
    convert = ConversationTokenizer(tokenizer, columns, longest, reading)

    def conversations() -> Iterator[Tokens]:
        has_answers = False
        for where, row in chain([first], table.rows):
            found = convert(row, where)
            if found is not None:
                has_answers = True
                yield found
        if not has_answers:
            raise ValueError(
                f"there is nothing to train on: {reading.lines(data)[-1]}; give rows with answers, a larger window "
                "where they are too long, or a chat template that marks answers ({% generation %}) where its own way "
                "is another"
            )

    return conversations()


@dataclass(frozen=True)
class ConversationTokenizer:
    """Writes conversations in the model's chat template and marks the tokens of answers.

    A conversation beyond the limit keeps its beginning, up to the last answer that ends within it. Messages behind the
    last answer are left out, and so is an empty answer with what follows. Prompts and completions that are texts are
    joined without a template, with the tokenizer's EOS at the end.

    Attributes:
        tokenizer: a fast one of `transformers`.
        columns: as `conversation_columns` gives them.
        longest: tokens of a row, at most.
        reading: counts rows, and what of them is left out, as they are read.

    Raises:
        ValueError: if the tokenizer gives no offsets of tokens.
    """

    tokenizer: Any
    columns: tuple[str, ...]
    longest: int
    reading: Reading

    def __post_init__(self) -> None:
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"{type(self.tokenizer).__name__} does not say where in a text its tokens stand, so that answers "
                "cannot be told from the rest; use a model with a fast tokenizer (tokenizer.json)"
            )

    def __call__(self, row: Row, where: str) -> Tokens | None:
        """Tokenize a row; None where it is left out.

        Args:
            where: place of the row, for error messages.

        Raises:
            ValueError: if it is no conversation, has an unknown role, or there is no template, or it cannot render it.
        """
        parts = [row.get(column) for column in self.columns]
        is_text = len(parts) > 1 and isinstance(parts[0], str) and isinstance(parts[1], str | None)
        used = self.columns
        if not is_text:
            used += ("tools", *_SYSTEM)
        self.reading.rows += 1
        self.reading.left_out.update(
            f"column {name!r}"
            for name, value in row.items()
            if name not in used and value not in (None, "", [], {})
        )
        if is_text:
            return self._texts(str(parts[0]), parts[1], where)
        asked, said = self._parts(parts, where)
        messages = [*asked, *said]
        prompts = {f"column {name!r}": row[name] for name in _SYSTEM if row.get(name) not in (None, "")}
        for place, text in prompts.items():
            if not isinstance(text, str):
                raise ValueError(
                    f"{where}: {place} should hold a text, not {show_value(text)}; mend this row"
                )
        begins = bool(messages) and messages[0]["role"] == "system"
        stated = prompts | ({"its first message": messages[0]["content"]} if begins else {})
        if len(set(stated.values())) > 1:
            raise ValueError(
                f"{where}: {' and '.join(stated)} have different system prompts; leave all but one out"
            )
        if prompts and not begins:
            messages.insert(0, {"role": "system", "content": next(iter(prompts.values()))})
        tools = row.get("tools")
        if isinstance(tools, str) and tools.strip():  # as JSON
            try:
                tools = json.loads(tools)
            except ValueError as error:
                raise ValueError(
                    f"{where}: column 'tools' is no JSON ({error}); mend this row"
                ) from error
        if not isinstance(tools or [], list):
            raise ValueError(
                f"{where}: column 'tools' should hold a list, not {show_value(tools)}; mend this row"
            )
        chat = _Chat(self.tokenizer, messages, tools or None, where, self.reading)
        return self._chat(chat, len(messages) - len(said) if asked else 0)

    def _parts(self, parts: list[Any], where: str) -> tuple[list[Message], list[Message]]:
        """Split into messages before the answers that count, and the rest; all are rest in one column."""
        places = [f"{where}: column {name!r}" for name in self.columns]
        if len(parts) > 1 and isinstance(parts[0], str):
            said = _parse_messages(parts[1], places[1])
            if not any(message["content"] == parts[0] for message in said):
                raise ValueError(
                    f"{where}: the prompt is a text, and the {self.columns[1]} is none, nor messages that have the "
                    f"prompt as one of them: {show_value(parts[1])}; give both as texts, or both as messages"
                )
            return [], said
        *before, said = (_parse_messages(part, place) for part, place in zip(parts, places, strict=True))
        asked = [message for messages in before for message in messages]
        if said[: len(asked)] == asked:  # some data says it again
            return asked, said[len(asked) :]
        return asked, said

    def _chat(self, chat: _Chat, asked: int) -> Tokens | None:
        """Tokenize a chat; answers among its first `asked` messages do not count."""
        left_out = self.reading.left_out
        ends = self._count_answers(chat.messages, asked)
        if not ends:
            left_out["rows_without_answer"] += 1
            return None
        chat = chat.with_calls(ends[-1])
        fitting = len(ends)
        if chat.length(ends[-1]) > self.longest:
            fitting = bisect_right(ends, self.longest, key=chat.length)
        if not fitting:
            left_out["rows_too_long"] += 1
            return None
        left_out["answers_cut"] += len(ends) - fitting
        # Marks would count the answers in a prompt, too.
        if not asked and _MARK.search(self.tokenizer.get_chat_template(None, chat.tools)):
            found = chat.tokenize_by_marks(ends[fitting - 1])
        else:
            found = chat.tokenize_by_texts(ends[:fitting])
        if found is not None:
            left_out.update(chat.unused_keys(ends[fitting - 1]))
            whole = chat.text(ends[fitting - 1])
            self.reading.sizes.update(characters=len(whole), tokens=len(found.ids))
        return found

    def _count_answers(self, messages: list[Message], asked: int) -> list[int]:
        """Count messages up to each answer behind the first `asked` that is not empty, nor behind an empty one."""
        ends = list[int]()
        is_whole = True
        sizes = self.reading.sizes
        for number, message in enumerate(messages, start=1):
            if message["role"] != "assistant":
                continue
            calls = message.get("tool_calls")
            is_filled = bool(message["content"].strip()) or "tool_calls" in message
            is_whole = is_whole and is_filled
            if is_filled and number > max(asked, 1):
                sizes["answer_characters"] += len(message["content"])
                if calls:
                    sizes["answer_characters"] += len(json.dumps(calls, ensure_ascii=False))
                if is_whole:
                    ends.append(number)
                else:
                    self.reading.left_out["answers_behind_empty"] += 1
        return ends

    def _texts(self, prompt: str, completion: str | None, where: str) -> Tokens | None:
        if not (completion or "").strip():
            self.reading.left_out["rows_without_answer"] += 1
            return None
        eos = self.tokenizer.eos_token or ""
        text = require_utf8(f"{prompt}{str(completion).removesuffix(eos)}{eos}", where)
        self.reading.sizes["answer_characters"] += len(text) - len(prompt)
        coded = self.tokenizer(text, return_offsets_mapping=True)
        count = len(coded["input_ids"])
        if count > self.longest:
            self.reading.left_out["rows_too_long"] += 1
            return None
        self.reading.sizes.update(characters=len(text), tokens=count)
        return _mark_answers(coded, [(len(prompt), len(text))], self.reading)


@dataclass(frozen=True)
class _Chat:
    """A conversation in a tokenizer's chat template."""

    tokenizer: Any
    messages: list[Message]
    tools: list[Any] | None
    where: str
    reading: Reading
    _texts: dict[tuple[int, bool], str] = field(default_factory=dict, init=False)
    _coded: dict[int, Any] = field(default_factory=dict, init=False)

    def with_calls(self, count: int) -> _Chat:
        """Take the first messages, with tool calls in the form that the template writes."""
        messages = self.messages[:count]
        with self._explain_template_errors(count):
            return replace(self, messages=with_calls_written(self._write, messages))

    def unused_keys(self, count: int) -> Iterator[str]:
        """Name keys of the first messages that change nothing in the template."""
        messages = self.messages[:count]
        for key in sorted({key for message in messages for key in message}.difference(_OF_MESSAGES)):
            if not differs(self._write, without_keys(messages, key), self.text(count)):
                yield f"key {key!r} of messages"
        if self.tools and not differs(replace(self, tools=None)._write, messages, self.text(count)):
            yield "column 'tools'"

    def length(self, count: int) -> int:
        return len(self._tokens(count)["input_ids"])

    def tokenize_by_marks(self, count: int) -> Tokens | None:
        with self._explain_template_errors(count):
            found = self._apply(
                self.messages[:count], return_dict=True, return_assistant_tokens_mask=True
            )
        if not any(found["assistant_masks"]):
            self.reading.left_out["rows_without_answer"] += 1
            return None
        return _with_answer(found["input_ids"], found["assistant_masks"], self.reading)

    def tokenize_by_texts(self, ends: Sequence[int]) -> Tokens | None:
        """Tokenize messages up to the last of these ends; answers are found by comparing texts."""
        whole = self.text(ends[-1])
        spans = []
        for end in ends:
            asked = self.text(end - 1, asks=True)
            behind = count_alike(whole, self.text(end)) if whole.startswith(asked) else 0
            spans.append((len(asked), behind))
        return _mark_answers(self._tokens(ends[-1]), spans, self.reading)

    def text(self, count: int, asks: bool = False) -> str:
        """Write the first messages, with the generation prompt where they ask for an answer."""
        if (count, asks) not in self._texts:
            with self._explain_template_errors(count):
                text = self._write(self.messages[:count], add_generation_prompt=asks)
            self._texts[count, asks] = require_utf8(text, self.where)
        return self._texts[count, asks]

    def _tokens(self, count: int) -> Any:
        if count not in self._coded:
            options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
            self._coded[count] = self.tokenizer(self.text(count), **options)
        return self._coded[count]

    def _write(self, messages: list[Message], **options: Any) -> str:
        return str(self._apply(messages, tokenize=False, **options))

    def _apply(self, messages: list[Message], **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(messages, tools=self.tools, **options)

    @contextmanager
    def _explain_template_errors(self, count: int) -> Iterator[None]:
        """Name the messages that the template refuses."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{self.where} is a conversation, and the tokenizer has no chat template to write it in; put a "
                "chat_template.jinja beside the model's tokenizer, that of its chat version, say, or give text"
            )
        try:
            yield
        except REFUSALS as error:
            raise ValueError(
                f"{self.where}: the chat template cannot render its first {plural(count, 'message')} "
                f"({first_line(error)}); mend the row or leave it out, or give the tokenizer another template"
            ) from error


def _mark_answers(coded: Any, spans: list[tuple[int, int]], reading: Reading) -> Tokens | None:
    """Mark the tokens of answers, which begin and end at these places of a text; None where there are none."""
    answers = list[list[bool]]()
    for first, behind in spans:
        answer = [first < end <= behind for _, end in coded["offset_mapping"]]
        if any(answer):
            answers.append(answer)
            across = any(start < first < end for start, end in coded["offset_mapping"])
            reading.sizes["answers_across"] += across
    reading.left_out["answers_rewritten"] += len(spans) - len(answers)
    if not answers:
        return None
    return _with_answer(coded["input_ids"], np.any(answers, axis=0), reading)


def _with_answer(ids: list[int], answer: ArrayLike, reading: Reading) -> Tokens:
    reading.sizes["trained"] += int(np.sum(answer))
    return Tokens(np.array(ids, np.int32), np.array(answer, np.bool_))


def _parse_messages(found: Any, where: str) -> list[Message]:
    if not isinstance(found, list | None):
        raise ValueError(f"{where} should hold a list of messages, not {show_value(found)}")
    messages = []
    for number, message in enumerate(found or []):
        place = f"{where}: message {number}"
        if isinstance(message, dict) and "from" in message:
            keys = ("from", "value")
        else:
            keys = ("role", "content")
        if not isinstance(message, dict) or keys[0] not in message:
            raise ValueError(f"{place} has no role (or from): {show_value(message)}")
        if (role := message[keys[0]]) not in _ROLES:
            raise ValueError(
                f"{place} has an unknown role, {show_value(role)}; known: {', '.join(_ROLES)}"
            )
        content = message.get(keys[1])
        weight = message.get("weight")
        if _ROLES[role] == "assistant":
            if weight not in (None, 1):
                raise ValueError(
                    f"{place} has the weight {show_value(weight)}, and all answers count; leave it out, or the key"
                )
            if content is None:
                content = ""
        others = {name: value for name, value in message.items() if name not in (*keys, "weight")}
        plain = {"role": _ROLES[role], "content": content, **others}
        messages.append(plain_message(plain, place))
    return messages
