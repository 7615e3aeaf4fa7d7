"""Conversations as tokens: what of them is an answer, what is cut, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.json
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizer

from surgeon.quality.conversations import ConversationTokenizer, conversation_columns, read_conversations
from surgeon.quality.data import Tokens
from surgeon.quality.sources import Reading
from tests.tiny_models import tiny_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Phi-3 ends whatever it renders.
CLOSED = CHATML + "{% if not add_generation_prompt %}</s>{% endif %}"
REWRITTEN = (  # as Qwen3 has it: an answer that is not the last one is written without what was thought
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
)
SYSTEM = {"role": "system", "content": "be quick"}
ASKED, ANSWERED = (
    {"role": "user", "content": "the fox?"},
    {"role": "assistant", "content": "The quick fox: é."},
)
AGAIN, MORE = (
    {"role": "user", "content": "and the dog"},
    {"role": "assistant", "content": "it went on sleeping"},
)
TWO_TURNS = [SYSTEM, ASKED, ANSWERED, AGAIN, MORE]


def tokenizer(template: str | None = CHATML) -> Any:
    found: Any = tiny_tokenizer()
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    found.chat_template = template
    return found


class Found(NamedTuple):
    """What a row comes to, and what is counted of it."""

    ids: list[int]
    answers: list[int]
    left_out: dict[str, int]
    sizes: dict[str, int]


def listed(found: Tokens | None) -> tuple[list[int], list[int]]:
    if found is None:
        return [], []
    assert found.answer is not None
    return found.ids.tolist(), found.answer.astype(int).tolist()


def reader(
    template: str | None = CHATML, *columns: str, longest: int = 1000
) -> Callable[[dict[str, Any], str], Found]:
    def read(row: dict[str, Any], where: str) -> Found:
        reading = Reading()
        convert = ConversationTokenizer(tokenizer(template), columns or ("messages",), longest, reading)
        found = listed(convert(row, where))
        assert reading.rows == 1
        assert reading.sizes["trained"] == sum(found[1])
        return Found(*found, dict(+reading.left_out), dict(+reading.sizes))

    return read


def pieces(*parts: tuple[str, int]) -> tuple[list[int], list[int]]:
    """Tokens of texts that stand one behind the other, each tokenized by itself, and the mark of each."""
    coded = [(tokenizer()(text, add_special_tokens=False)["input_ids"], mark) for text, mark in parts]
    return [token for ids, _ in coded for token in ids], [mark for ids, mark in coded for _ in ids]


HEAD = (
    "<|im_start|>system\nbe quick<|im_end|>\n<|im_start|>user\nthe fox?<|im_end|>\n<|im_start|>assistant\n",
    0,
)
FIRST = ("The quick fox: é.<|im_end|>", 1)
MIDDLE = ("<|im_start|>user\nand the dog<|im_end|>\n<|im_start|>assistant\n", 0)
SECOND = ("it went on sleeping<|im_end|>", 1)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["messages", "prompt", "text"], ("messages",)),
        (["id", "conversations"], ("conversations",)),
        (["completion", "prompt"], ("prompt", "completion")),
        (["rejected", "chosen", "prompt"], ("prompt", "chosen")),
        (["prompt", "text"], ()),
        (["chosen", "rejected"], ()),  # texts, whose prompts nothing tells from answers
    ],
)
def test_columns_of_conversations(names: list[str], found: tuple[str, ...]) -> None:
    assert conversation_columns(dict.fromkeys(names, "")) == found
    assert conversation_columns({"chosen": TWO_TURNS, "rejected": TWO_TURNS}) == ("chosen",)


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (CHATML, [HEAD, FIRST, ("\n", 1), MIDDLE, SECOND, ("\n", 1)]),
        (MARKED, [HEAD, FIRST, ("\n", 0), MIDDLE, SECOND, ("\n", 0)]),
        (CLOSED, [HEAD, FIRST, ("\n", 1), MIDDLE, SECOND, ("\n", 1), ("</s>", 1)]),
    ],
)
def test_answers_of_several_turns_with_the_ends_of_their_turns(
    template: str, parts: list[tuple[str, int]]
) -> None:
    # Nothing answers the last message.
    found = reader(template)({"messages": [*TWO_TURNS, AGAIN]}, "row 1")
    assert (found.ids, found.answers) == pieces(*parts)
    assert not found.left_out


def test_share_gpt_is_read_as_messages_are() -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    said = [{"from": names[m["role"]], "value": m["content"], "weight": None} for m in TWO_TURNS]
    found = reader(CHATML, "conversations")({"conversations": said}, "row 1")
    assert found == reader()({"messages": TWO_TURNS}, "row 1")


def test_completions_are_answers_and_what_a_prompt_has_is_not() -> None:
    row = {"prompt": TWO_TURNS[:4], "completion": [MORE]}
    parts = [HEAD, (f"{FIRST[0]}\n", 0), MIDDLE, SECOND]
    found = reader(CHATML, "prompt", "completion")(row, "row 1")
    assert (found.ids, found.answers) == pieces(*parts, ("\n", 1))
    # Whose marks are on the prompt's answers, too.
    found = reader(MARKED, "prompt", "completion")(row, "row 1")
    assert (found.ids, found.answers) == pieces(*parts, ("\n", 1))


def test_prompts_and_completions_that_are_texts_stand_in_no_template() -> None:
    texts = reader(None, "prompt", "completion", longest=20)
    found = texts({"prompt": "the fox:", "completion": " jumps"}, "row 1")
    assert (found.ids, found.answers) == pieces(("<s>the fox:", 0), (" jumps</s>", 1))
    assert texts({"prompt": "the fox:", "completion": " jumps</s>"}, "row 1") == found
    assert texts({"prompt": "the fox:", "completion": " "}, "row 1").left_out == {
        "rows_without_answer": 1
    }
    assert texts({"prompt": "the fox:", "completion": "fox " * 20}, "row 1").left_out == {
        "rows_too_long": 1
    }
    across = texts({"prompt": "the fox and the ", "completion": "dog"}, "row 1")
    whole = texts({"prompt": "the fox and the", "completion": " dog"}, "row 1")
    assert (across.ids, across.answers) == (whole.ids, whole.answers)
    assert (across.ids, across.answers) == pieces(("<s>the fox and the", 0), (" dog</s>", 1))
    assert (across.sizes["answers_across"], "answers_across" in whole.sizes) == (1, False)


def test_answers_that_are_preferred_are_trained_on() -> None:
    preferred = reader(CHATML, "prompt", "chosen")
    parts = [HEAD, (f"{FIRST[0]}\n", 0), MIDDLE, SECOND, ("\n", 1)]
    for chosen in ([MORE], TWO_TURNS):  # some data says the prompt again
        found = preferred({"prompt": TWO_TURNS[:4], "chosen": chosen, "rejected": [ANSWERED]}, "row 1")
        assert (found.ids, found.answers, found.left_out) == (*pieces(*parts), {"column 'rejected'": 1})
    whole = reader()({"messages": TWO_TURNS}, "row 1")
    found = preferred({"prompt": AGAIN["content"], "chosen": TWO_TURNS}, "row 1")
    assert (found.ids, found.answers) == (whole.ids, whole.answers)
    found = preferred({"prompt": "the fox:", "chosen": " jumps", "rejected": " dog"}, "row 1")
    assert (found.ids, found.answers) == pieces(("<s>the fox:", 0), (" jumps</s>", 1))
    with pytest.raises(
        ValueError, match="row 7: the prompt is a text, and the chosen is none, nor messages that have"
    ):
        preferred({"prompt": "the", "chosen": TWO_TURNS}, "row 7")


@pytest.mark.parametrize("column", ["system", "system_prompt", "system_message"])
def test_a_system_prompt_beside_a_conversation_begins_it(column: str) -> None:
    whole = reader()({"messages": TWO_TURNS}, "row 1")
    assert reader()({column: "be quick", "messages": TWO_TURNS[1:]}, "row 1") == whole
    assert reader()({column: "be quick", "messages": TWO_TURNS}, "row 1") == whole
    asked = reader(CHATML, "prompt", "completion")
    first = asked({"prompt": TWO_TURNS[:4], "completion": [MORE]}, "row 1")
    assert asked({column: "be quick", "prompt": TWO_TURNS[1:4], "completion": [MORE]}, "row 1") == first
    with pytest.raises(
        ValueError, match=rf"row 7: column '{column}' and its first message have different system"
    ):
        reader()({column: "be slow", "messages": TWO_TURNS}, "row 7")
    with pytest.raises(
        ValueError, match="row 7: column 'system' and column 'system_prompt' have different system"
    ):
        reader()({"system": "be slow", "system_prompt": "be quick", "messages": TWO_TURNS[1:]}, "row 7")
    texts = reader(None, "prompt", "completion")(
        {column: "be quick", "prompt": "the", "completion": " fox"}, "row 1"
    )
    assert texts.left_out == {f"column '{column}'": 1}


def test_keys_that_nothing_reads_are_counted() -> None:
    named = {**ANSWERED, "name": "fox", "weight": 1, "thought": "long"}
    row = {"messages": [ASKED, named], "id": 3, "tools": [{"name": "dog"}], "source": "", "score": None}
    found = reader()(row, "row 1")
    told = {f"key {name!r} of messages": 1 for name in ("name", "thought")}
    assert found.left_out == {"column 'id'": 1, "column 'tools'": 1} | told
    template = "{{ tools }}" + CHATML.replace("m.content", "m.name ~ m.content")
    assert reader(template)(row, "row 1").left_out == {"column 'id'": 1, "key 'thought' of messages": 1}
    with pytest.raises(ValueError, match=r"row 7: .*message 1 has the weight 0, and all answers count"):
        reader()({"messages": [ASKED, {**ANSWERED, "weight": 0}]}, "row 7")


def test_calls_of_tools_are_answers_in_the_form_in_which_the_template_writes_them() -> None:
    """This one looks for an answer that is no text, and, as DeepSeek's, puts the JSON of arguments behind the name."""
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}\n{% else %}"
        "{{ m.tool_calls[0].function.name + m.tool_calls[0].function.arguments }}</s>{% endif %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
    as_json = {"type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox?"}]
    for asked, called in ((ASKED["content"], call), (parts, as_json)):
        answer = {"role": "assistant", "content": None, "tool_calls": [called]}
        found = reader(template)({"messages": [{"role": "user", "content": asked}, answer]}, "row 1")
        assert (found.ids, found.answers) == pieces(("the fox?\n", 0), ('look{"at": "é"}</s>', 1))
        with pytest.raises(
            ValueError, match=r"row 7: the chat template .* 2 messages \(it leaves out tool_calls"
        ):
            reader()({"messages": [ASKED, answer]}, "row 7")


def test_an_answer_that_is_written_anew_is_read_and_not_trained_on() -> None:
    found = reader(REWRITTEN)({"messages": TWO_TURNS}, "row 1")
    last = ("<think>\n\n</think>\n\nit went on sleeping<|im_end|>\n", 1)
    assert (found.ids, found.answers) == pieces(HEAD, (f"{FIRST[0]}\n", 0), MIDDLE, last)
    assert found.left_out == {"answers_rewritten": 1}


def test_a_token_over_the_border_belongs_to_the_answer() -> None:
    coded, answer = tokenizer(), {"role": "assistant", "content": "dog, the dog"}
    assert len(coded(" dog", add_special_tokens=False)["input_ids"]) == 1
    found = reader("{% for m in messages %}{{ m.content }} {% endfor %}")(
        {"messages": [ASKED, answer]}, "row 1"
    )
    trained = [token for token, mark in zip(found.ids, found.answers, strict=True) if mark]
    assert coded.decode(found.ids) == "the fox? dog, the dog "
    assert coded.decode(trained) == " dog, the dog "
    assert found.sizes["answers_across"] == 1


def test_a_long_conversation_ends_with_the_last_answer_that_fits() -> None:
    whole, first = (reader()({"messages": TWO_TURNS[:count]}, "row 1") for count in (5, 3))
    assert reader(longest=len(whole.ids))({"messages": TWO_TURNS}, "row 1") == whole
    cut = reader(longest=len(whole.ids) - 1)({"messages": TWO_TURNS}, "row 1")
    assert (cut.ids, cut.answers, cut.left_out) == (first.ids, first.answers, {"answers_cut": 1})
    assert reader(longest=len(first.ids))({"messages": TWO_TURNS}, "row 1").ids == first.ids
    none = reader(longest=len(first.ids) - 1)({"messages": TWO_TURNS}, "row 1")
    assert (none.ids, none.left_out) == ([], {"rows_too_long": 1})


def test_many_turns_are_cut_where_the_next_does_not_fit() -> None:
    said = [SYSTEM, *[ASKED, ANSWERED] * 9]
    lengths = [len(reader()({"messages": said[:end]}, "row 1").ids) for end in range(3, 20, 2)]
    for kept, length in enumerate(lengths[:-1], start=1):
        found = reader(longest=lengths[kept] - 1)({"messages": said}, "row 1")
        assert len(found.ids) == length
        assert found.left_out == {"answers_cut": 9 - kept}


@pytest.mark.parametrize(
    "messages",
    [None, [], [SYSTEM, ASKED], [ANSWERED], [ASKED, {"role": "assistant", "content": " "}, AGAIN, MORE]],
)
def test_rows_without_an_answer_are_left_out(messages: Any) -> None:
    found = reader()({"messages": messages}, "row 1")
    behind = {"answers_behind_empty": 1} if messages and MORE in messages else {}
    assert (found.ids, found.left_out) == ([], {"rows_without_answer": 1} | behind)


def test_tools_are_given_to_the_template() -> None:
    template = "{% for t in tools or [] %}{{ t.name }} {% endfor %}" + CHATML
    tools = [{"name": "fox"}]
    for given in (tools, '[{"name": "fox"}]'):
        found = reader(template)({"messages": TWO_TURNS, "tools": given}, "row 1")
        assert (found.ids, found.answers) == pieces(
            ("fox ", 0), HEAD, FIRST, ("\n", 1), MIDDLE, SECOND, ("\n", 1)
        )


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (
            STRICT,
            {"messages": TWO_TURNS},
            r"row 7: .*cannot render its first 5 messages \(System role not supported\)",
        ),
        (
            CHATML,
            {"messages": [ASKED, {"role": "bot", "content": "x"}]},
            r"row 7: column 'messages': message 1 .*'bot'",
        ),
        (CHATML, {"messages": [ASKED, "no"]}, r"row 7: .*message 1 has no role .*'no'"),
        (CHATML, {"messages": [{"role": "user"}, MORE]}, r"row 7: .*message 0.content must be a text"),
        (
            CHATML,
            {"messages": [ASKED, MORE], "system": 3},
            r"row 7: column 'system' should hold a text, not 3",
        ),
        (
            CHATML,
            {"messages": "the fox"},
            r"row 7: column 'messages' should hold a list of messages, not 'the fox'",
        ),
        (CHATML, {"messages": TWO_TURNS, "tools": "{"}, r"row 7: column 'tools' is no JSON"),
        (CHATML, {"messages": TWO_TURNS, "tools": "1"}, r"row 7: column 'tools' should hold a list"),
        (
            CHATML,
            {"messages": [ASKED, {**MORE, "content": "\ud800"}]},
            r"row 7 is not text in UTF-8 .*U\+D800",
        ),
        (
            None,
            {"messages": TWO_TURNS},
            r"row 7 is a conversation, .* no chat template .* chat_template.jinja",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused(
    template: str | None, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        reader(template)(row, "row 7")


def test_a_prompt_is_a_text_if_its_completion_is_one() -> None:
    with pytest.raises(
        ValueError, match="row 7: the prompt is a text, and the completion is none, nor messages"
    ):
        reader(None, "prompt", "completion")({"prompt": "the", "completion": [MORE]}, "row 7")


def test_a_tokenizer_without_places_is_refused() -> None:
    class Slow(PreTrainedTokenizer):
        vocab_size = 1

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    with pytest.raises(ValueError, match="Slow does not say where"):
        ConversationTokenizer(Slow(), ("messages",), 10, Reading())


def written(folder: Path, rows: list[dict[str, Any]], name: str = "chat.jsonl") -> str:
    """A table of rows in a file."""
    path = folder / name
    if name.endswith(".parquet"):
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("name", ["chat.jsonl", "chat.parquet"])
def test_tables_of_conversations_are_read_in_order_and_counted(name: str, tmp_path: Path) -> None:
    rows = [
        {"text": "", "messages": each, "id": "a"}
        for each in (TWO_TURNS, [ASKED], [ASKED, MORE], [ASKED, ANSWERED])
    ]
    data, reading = written(tmp_path, rows, name), Reading()
    longest = len(reader()(rows[0], "").ids) - 1
    found = read_conversations(tokenizer(), data, longest, reading)
    assert found is not None
    convert = reader(longest=longest)
    wanted = [convert(row, "") for row in rows if row["messages"] != [ASKED]]
    assert [listed(each) for each in found] == [(each.ids, each.answers) for each in wanted]
    assert reading.lines("x") == [
        "x: left out 1 row without an answer, 1 answer behind a window's end, column 'id' of 4 rows (of 4 rows read)"
    ]


def test_nulls_that_parquet_puts_into_objects_are_none_of_theirs(tmp_path: Path) -> None:
    template = "{{ tools | tojson }}" + CHATML.replace(
        "m.content", "(m.tool_calls | tojson if m.tool_calls else m.content)"
    )

    def row(**arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        kinds = {name: {"type": type(value).__name__} for name, value in arguments.items()}
        return {
            "messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}],
            "tools": [kinds],
        }

    rows = [row(at="a"), row(days=3)]
    lines, table = written(tmp_path, rows), tmp_path / "chat.parquet"
    parquet.write_table(pa.json.read_json(lines), table)
    assert next(iter(parquet.read_table(table).to_pylist()))["tools"][0]["days"] is None
    one, other = (read_conversations(tokenizer(template), str(data), 1000) for data in (lines, table))
    assert one is not None
    assert other is not None
    found = [listed(each) for each in one]
    assert [listed(each) for each in other] == found
    assert "null" not in tokenizer().decode([token for ids, _ in found for token in ids])


def test_a_run_that_trains_on_little_of_its_answers_says_so(tmp_path: Path) -> None:
    turns = [SYSTEM, *[ASKED, {**ANSWERED, "content": "the fox went on and on " * 8}] * 12, ASKED, MORE]
    for template, few in ((REWRITTEN, True), (CHATML, False)):
        reading = Reading()
        found = read_conversations(
            tokenizer(template), written(tmp_path, [{"messages": turns}]), 10000, reading
        )
        assert found is not None
        (only,) = found
        lines = [line for line in reading.lines("x") if line.startswith("x: only ")]
        assert len(lines) == few
        if few:
            text = "".join(message["content"] for message in turns if message["role"] == "assistant")
            about = len(text) * len(only.ids) / len(tokenizer().decode(only.ids))
            assert f"only {sum(listed(only)[1])} tokens of answers count, where the answers" in lines[0]
            assert int(lines[0].split("about ")[1].split(";")[0].replace(",", "")) == pytest.approx(
                about, rel=0.01
            )


def test_a_column_of_lists_is_one_of_conversations_if_it_is_named(tmp_path: Path) -> None:
    data = written(tmp_path, [{"chosen": [ASKED, MORE], "text": "the fox"}])
    assert read_conversations(tokenizer(), data, 100) is None
    assert read_conversations(tokenizer(), f"{data}:text", 100) is None
    assert read_conversations(tokenizer(), "demo", 100) is None
    reading = Reading()
    found = read_conversations(tokenizer(), f"{data}:chosen", 100, reading)
    assert found is not None
    assert listed(next(found)) == reader()({"messages": [ASKED, MORE]}, "")[:2]
    assert +reading.left_out == {"column 'text'": 1}


def test_where_no_row_has_an_answer_it_is_said_why(tmp_path: Path) -> None:
    data = written(tmp_path, [{"messages": [ASKED]}, {"messages": [ASKED, ANSWERED]}])
    found = read_conversations(tokenizer(), data, 3)
    assert found is not None
    message = r"nothing to train on: .*1 row without an answer, 1 row whose first answer ends behind .*\(of 2 rows"
    with pytest.raises(ValueError, match=message):
        list(found)
    # Which no answer here begins with.
    thinking = CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"
    found = read_conversations(tokenizer(thinking), written(tmp_path, [{"messages": TWO_TURNS}]), 1000)
    assert found is not None
    with pytest.raises(
        ValueError, match="the learning of 2 answers that the chat template writes in another way"
    ):
        list(found)
    broken = written(tmp_path, [{"messages": [ASKED, MORE]}, {"messages": "no"}])
    found = read_conversations(tokenizer(), broken, 100)
    assert found is not None
    with pytest.raises(ValueError, match=r"chat.jsonl:2: column 'messages' should hold a list"):
        list(found)
