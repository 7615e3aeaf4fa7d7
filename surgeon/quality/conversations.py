"""Rows of conversations as tokens, and which of these a model is trained on: those of its answers.

What a model writes at its turn is what its chat template puts behind the generation prompt, up to the end of the turn.
Where a template marks that itself ({% generation %}), its marks are taken. Of others an answer is what the whole
conversation has in common with the conversation that ends with it, behind the conversation before it with the
generation prompt: a model is only trained on what it would have read and written there. A template that writes an
earlier answer anew once others follow (Qwen3 takes out what was thought) has nothing of the kind for it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, takewhile
from typing import Any

from jinja2 import TemplateError

from surgeon.errors import first_line, shown
from surgeon.quality.sources import table_rows
from surgeon.quality.tables import Row
from surgeon.quality.text_files import Reading, lone_surrogate
from surgeon.words import plural

_COLUMNS = (("messages",), ("conversations",), ("prompt", "completion"))
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
_ROLES |= {"human": "user", "gpt": "assistant"}  # as ShareGPT has them
_MARK = re.compile(r"{%-?\s*generation\s*-?%}")
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

Message = dict[str, Any]


def conversation_columns(names: Iterable[str]) -> tuple[str, ...]:
    """Which of a table's columns hold conversations: messages, conversations, or prompt and completion; () if none."""
    there = set(names)
    return next((columns for columns in _COLUMNS if there.issuperset(columns)), ())


@dataclass(frozen=True)
class ConversationTokens:
    """A row.

    Attributes:
        ids: its tokens; none where the row is left out.
        answers: 1 for each token that is trained on, 0 for the others.
        left_out: how many of what is not in them: rows_without_answer, rows_too_long (not even the first answer ends
            within the limit), answers_cut (behind the limit), answers_rewritten (read, but not trained on).
    """

    ids: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)


def read_conversations(
    tokenizer: Any, data: str, longest: int, reading: Reading | None = None, after: int = 0
) -> Iterator[ConversationTokens] | None:
    """The conversations of a table or a dataset, as a stream; None of other data, which is read as text.

    Which it is says the first row, or a column that is named, if there is a list in it.

    Args:
        data: as `surgeon.quality.data.load_windows` takes it.
        longest, tokenizer: as `ConversationTokenizer` has them.
        reading: is told, as rows are read, how many have been, and what of them is left out.
        after: how many rows are passed over at the start, as have been read before.

    Raises:
        FileNotFoundError: if there is no such file or dataset.
        ValueError: as `ConversationTokenizer`; or if a row is damaged, or no row has an answer to train on.
    """
    reading = reading or Reading()
    found = table_rows(data, reading)
    if found is None:
        return None
    column, rows = found
    first = list(islice(rows, 1))
    columns = conversation_columns(first[0][1]) if first else ()
    if column is not None:
        columns = (column,) if first and isinstance(first[0][1].get(column), list) else ()
    if not columns:
        return None
    following = islice(chain(first, rows), after, None)
    return _read(ConversationTokenizer(tokenizer, columns, longest), following, data, reading, after > 0)


def _read(
    convert: ConversationTokenizer, rows: Iterable[tuple[str, Row]], data: str, reading: Reading, has_answers: bool
) -> Iterator[ConversationTokens]:
    for where, row in rows:
        found = convert(row, where)
        reading.rows += 1
        reading.left_out.update(found.left_out)
        if found.ids:
            has_answers = True
            yield found
    if not has_answers:
        raise ValueError(
            f"there is nothing to train on: {reading.lines(data)[-1]}; give rows with answers, a larger window where "
            "they are too long, or a chat template that marks answers ({% generation %}) where its own way is another"
        )


class ConversationTokenizer:
    """Writes conversations as the model's chat template does, and says which tokens are answers.

    A conversation that is longer than the limit keeps its beginning, up to the last answer that ends within it. What
    follows the last answer of all is left out, and so is an empty answer with what follows. Prompts and completions
    that are texts stand one behind the other, with the tokenizer's EOS at the end, in no template.

    Args:
        tokenizer: a fast one of `transformers`.
        columns: as `conversation_columns` gives them.
        longest: how many tokens a row may have.

    Raises:
        ValueError: if the tokenizer cannot say where in a text its tokens stand.
    """

    def __init__(self, tokenizer: Any, columns: Sequence[str], longest: int) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not say where in a text its tokens stand, so that answers cannot be "
                "told from the rest; use a model with a fast tokenizer (tokenizer.json)"
            )
        self.tokenizer, self.columns, self.longest = tokenizer, tuple(columns), longest

    def __call__(self, row: Mapping[str, Any], where: str) -> ConversationTokens:
        """The tokens of a row.

        Args:
            where: it stands, for error messages.

        Raises:
            ValueError: if it is no conversation, has an unknown role, or there is no template, or it cannot render it.
        """
        parts = [row.get(column) for column in self.columns]
        if len(parts) > 1 and isinstance(parts[0], str):
            return self._texts(parts[0], parts[1], where)
        lists = [_messages(part, f"{where}: column {name!r}") for name, part in zip(self.columns, parts, strict=True)]
        chat = _Chat(self.tokenizer, [message for each in lists for message in each], _tools(row, where), where)
        ends = [end for end in chat.ends() if len(lists) == 1 or end > len(lists[0])]
        if not ends:
            return ConversationTokens(left_out={"rows_without_answer": 1})
        fitting = len(ends)
        if chat.length(ends[-1]) > self.longest:
            fitting = bisect_right(ends, self.longest, key=chat.length)
        if not fitting:
            return ConversationTokens(left_out={"rows_too_long": 1})
        marked = len(lists) == 1 and chat.has_marks  # they would count the answers in a prompt, too
        found = chat.marked(ends[fitting - 1]) if marked else chat.compared(ends[:fitting])
        cut = {"answers_cut": len(ends) - fitting} if fitting < len(ends) else {}
        return replace(found, left_out=cut | found.left_out)

    def _texts(self, prompt: str, completion: Any, where: str) -> ConversationTokens:
        if not isinstance(completion, str | None):
            raise ValueError(f"{where}: the prompt is a text, and the completion is none: {shown(completion)}")
        if not (completion or "").strip():
            return ConversationTokens(left_out={"rows_without_answer": 1})
        eos = self.tokenizer.eos_token or ""
        text = _checked(f"{prompt}{str(completion).removesuffix(eos)}{eos}", where)
        coded = self.tokenizer(text, return_offsets_mapping=True)
        if len(coded["input_ids"]) > self.longest:
            return ConversationTokens(left_out={"rows_too_long": 1})
        return ConversationTokens(coded["input_ids"], _within(coded, len(prompt), len(text)))


@dataclass(frozen=True)
class _Chat:
    """A conversation in a tokenizer's chat template."""

    tokenizer: Any
    messages: list[Message]
    tools: list[Any] | None
    where: str

    def ends(self) -> list[int]:
        """How many messages there are up to each answer to something."""
        assistants = (number for number, message in enumerate(self.messages) if message["role"] == "assistant")
        filled = takewhile(lambda number: _is_filled(self.messages[number]), assistants)
        return [number + 1 for number in filled if number]

    def length(self, count: int) -> int:
        """Of the first messages, in tokens."""
        return len(self._coded(self._text(count))["input_ids"])

    @property
    def has_marks(self) -> bool:
        """Whether the template says itself what answers are."""
        return _MARK.search(self.tokenizer.get_chat_template(None, self.tools)) is not None

    def marked(self, count: int) -> ConversationTokens:
        """The first messages, with the answers that the template marks."""
        found = self._apply(count, return_dict=True, return_assistant_tokens_mask=True)
        if not any(found["assistant_masks"]):
            return ConversationTokens(left_out={"rows_without_answer": 1})
        return ConversationTokens(found["input_ids"], found["assistant_masks"])

    def compared(self, ends: Sequence[int]) -> ConversationTokens:
        """The messages up to the last of these ends, with the answers of which the template shows what they are."""
        whole = self._text(ends[-1])
        coded = self._coded(whole)
        each = []
        for end in ends:
            asked, said = self._text(end - 1, add_generation_prompt=True), self._text(end)
            is_asked = whole.startswith(asked)
            each.append(_within(coded, len(asked), _common(whole, said)) if is_asked else [])
        trained = [answer for answer in each if any(answer)]
        lost = {"answers_rewritten": len(each) - len(trained)} if len(trained) < len(each) else {}
        if not trained:
            return ConversationTokens(left_out=lost)
        return ConversationTokens(coded["input_ids"], [int(any(token)) for token in zip(*trained, strict=True)], lost)

    def _text(self, count: int, **options: Any) -> str:
        return _checked(self._apply(count, tokenize=False, **options), self.where)

    def _coded(self, text: str) -> Any:
        return self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    def _apply(self, count: int, **options: Any) -> Any:
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{self.where} is a conversation, and the tokenizer has no chat template to write it in; put a "
                "chat_template.jinja beside the model's tokenizer, that of its chat version, say, or give text"
            )
        try:
            return self.tokenizer.apply_chat_template(self.messages[:count], tools=self.tools, **options)
        except _REFUSALS as error:
            raise ValueError(
                f"{self.where}: the chat template cannot render its first {plural(count, 'message')} "
                f"({first_line(error)}); mend the row or leave it out, or give the tokenizer another template"
            ) from error


def _within(coded: Any, first: int, behind: int) -> list[int]:
    """1 for each token that lies between two places of a text, 0 for the others."""
    return [int(first <= start < end <= behind) for start, end in coded["offset_mapping"]]


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _is_filled(message: Message) -> bool:
    content = message.get("content")
    return bool(content.strip() if isinstance(content, str) else content) or bool(message.get("tool_calls"))


def _messages(found: Any, where: str) -> list[Message]:
    """The messages of a column, each with a role that templates know and a content."""
    if not isinstance(found, list | None):
        raise ValueError(f"{where} should hold a list of messages, not {shown(found)}")
    messages = []
    for number, message in enumerate(found or []):
        keys = ("from", "value") if isinstance(message, dict) and "from" in message else ("role", "content")
        if not isinstance(message, dict) or keys[0] not in message:
            raise ValueError(f"{where}: message {number} has no role (or from): {shown(message)}")
        if (role := message[keys[0]]) not in _ROLES:
            raise ValueError(
                f"{where}: message {number} has an unknown role, {shown(role)}; known: {', '.join(_ROLES)}"
            )
        others = {name: value for name, value in message.items() if name not in keys}
        messages.append({"role": _ROLES[role], "content": message.get(keys[1]), **others})
    return messages


def _tools(row: Mapping[str, Any], where: str) -> list[Any] | None:
    """What the model may call, as chat templates take it; tables have it as JSON, too."""
    tools = row.get("tools")
    try:
        found = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    except ValueError as error:
        raise ValueError(f"{where}: column 'tools' is no JSON ({error}); mend this row") from error
    if not isinstance(found or [], list):
        raise ValueError(f"{where}: column 'tools' should hold a list, not {shown(found)}; mend this row")
    return found or None


def _checked(text: str, where: str) -> str:
    if (surrogate := lone_surrogate(text)) is not None:
        raise ValueError(f"{where} is not text in UTF-8 ({surrogate}); mend this row")
    return text
