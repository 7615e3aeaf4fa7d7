"""Tasks computed by lm-eval, against log-likelihoods and greedy text from plain PyTorch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import surgeon
from surgeon.quality.tasks import Answers, TaskSettings
from tests.quality.tasks_helpers import (
    CHOICES,
    CONTEXTS,
    CONTINUATIONS,
    NUMBERS,
    Row,
    evaluate,
    write_rows,
)
from tests.reference import Reference
from tests.tiny_models import tiny_model, tiny_tokenizer

POSITIONS = 128


@pytest.fixture(autouse=True)
def _no_questions_about_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's record of the machine takes most of a second."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture
def model(tokenizer: Any) -> Any:
    return tiny_model("llama", 3, vocab_size=len(tokenizer))


def plain_logits(model: Any) -> Callable[[list[int]], Tensor]:
    """The unedited model's logits, (tokens, vocabulary), computed without surgeon, transformers and lm-eval."""
    reference = Reference(model)

    def logits(ids: list[int]) -> Tensor:
        x = reference.embed(torch.tensor([ids]))
        for k in range(model.config.num_hidden_layers):
            x = reference.layer(k, x)
        return reference.logits(x)[0]

    return logits


def score(
    logits: Callable[[list[int]], Tensor], tokenizer: Any, context: str, text: str
) -> tuple[float, bool]:
    """The log-likelihood of a text after a context, and whether greedy decoding would write it."""
    ids, known = tokenizer(context + text)["input_ids"], len(tokenizer(context)["input_ids"])
    log_p = logits(ids).log_softmax(-1)
    total, greedy = 0.0, True
    for position in range(known, len(ids)):
        total += float(log_p[position - 1, ids[position]])
        greedy &= int(log_p[position - 1].argmax()) == ids[position]
    return total, greedy


def answered(results: dict[str, Any], task: str) -> list[list[tuple[float, bool]]]:
    """Of each row, what the model said to each request."""
    return [[answer for (answer,) in sample["resps"]] for sample in results["samples"][task]]


def assert_scores(
    found: list[list[tuple[float, bool]]], expected: list[list[tuple[float, bool]]]
) -> None:
    assert [len(row) for row in found] == [len(row) for row in expected]
    for (value, greedy), (plain, plainly) in zip(chain(*found), chain(*expected), strict=True):
        assert value == pytest.approx(plain, rel=1e-4)
        assert greedy == plainly


@pytest.mark.parametrize("batch_size", [1, 3])
def test_multiple_choice(model: Any, tokenizer: Any, tmp_path: Path, batch_size: int) -> None:
    results = evaluate(
        model, tokenizer, write_rows(tmp_path / "c.jsonl", CHOICES), batch_size=batch_size
    )
    logits = plain_logits(model)
    prompts = [
        "Question: What is lazy?\nAnswer:",
        "The dog went on",
        "Question: Who had seen it? Answer:",
        "The lazy dog",
    ]
    expected = [
        [score(logits, tokenizer, prompt, f" {choice}") for choice in row["choices"]]
        for prompt, row in zip(prompts, CHOICES, strict=True)
    ]
    assert_scores(answered(results, "c"), expected)
    right = [
        np.argmax([value for value, _ in row]) == CHOICES[i]["gold"] for i, row in enumerate(expected)
    ]
    by_length = [
        np.argmax(
            [value / len(choice) for (value, _), choice in zip(row, CHOICES[i]["choices"], strict=True)]
        )
        == CHOICES[i]["gold"]
        for i, row in enumerate(expected)
    ]
    found = results["results"]["c"]
    assert (found["acc,none"], found["acc_norm,none"]) == (np.mean(right), np.mean(by_length))
    assert right != by_length  # or one could be taken for the other
    assert found["acc_stderr,none"] == pytest.approx(np.std(right, ddof=1) / math.sqrt(len(right)))


def test_one_text_after_several_contexts(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    results = evaluate(model, tokenizer, write_rows(tmp_path / "w.jsonl", CONTEXTS))
    logits = plain_logits(model)
    expected = [
        [
            score(logits, tokenizer, context.rstrip(), f" {row['continuation'].strip()}")
            for context in row["context_options"]
        ]
        for row in CONTEXTS
    ]
    assert_scores(answered(results, "w"), expected)
    right = [
        np.argmax([value for value, _ in row]) == CONTEXTS[i]["gold"] for i, row in enumerate(expected)
    ]
    assert results["results"]["w"]["acc,none"] == np.mean(right)


def test_continuations(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    logits = plain_logits(model)
    greedy = tokenizer.decode(int(logits(tokenizer("the fox and")["input_ids"])[-1].argmax()))
    # A third row that greedy decoding gets right, as far as its first token is a word's beginning.
    rows = [*CONTINUATIONS, {"context": "the fox and", "continuation": greedy.strip() or "x"}]
    results = evaluate(model, tokenizer, write_rows(tmp_path / "l.jsonl", rows))
    expected = [
        [score(logits, tokenizer, r["context"].rstrip(), " " + r["continuation"].lstrip())] for r in rows
    ]
    assert_scores(answered(results, "l"), expected)
    found = results["results"]["l"]
    values = [value for ((value, _),) in expected]
    assert found["perplexity,none"] == pytest.approx(math.exp(-np.mean(values)), rel=1e-4)
    assert found["acc,none"] == np.mean([right for ((_, right),) in expected])


def write_greedily(
    logits: Callable[[list[int]], Tensor], tokenizer: Any, prompt: str, count: int
) -> str:
    ids = tokenizer(prompt)["input_ids"]
    new: list[int] = []
    while len(new) < count and tokenizer.eos_token_id not in new:
        new.append(int(logits(ids + new)[-1].argmax()))
    text: str = tokenizer.decode(new, skip_special_tokens=True)
    return text


@pytest.mark.parametrize("batch_size", [1, 3])
def test_numbers(model: Any, tokenizer: Any, tmp_path: Path, batch_size: int) -> None:
    logits = plain_logits(model)
    prompts = [f"Question: {row['context']}\nAnswer:" for row in NUMBERS]
    written = [write_greedily(logits, tokenizer, prompt, POSITIONS // 2) for prompt in prompts]
    numbers = [re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", text) for text in written]
    digits = next(i for i, found in enumerate(numbers) if found and found[-1].isdigit())
    rows = [
        dict(row, answer=numbers[i][-1] if i == digits else row["answer"])
        for i, row in enumerate(NUMBERS)
    ]
    results = evaluate(model, tokenizer, write_rows(tmp_path / "g.jsonl", rows), batch_size=batch_size)
    samples = [sample for sample in results["samples"]["g"] if sample["filter"] == "flexible-extract"]
    assert [sample["resps"][0][0] for sample in samples] == written
    found = results["results"]["g"]
    right = [
        bool(n) and n[-1].replace(",", "").rstrip(".") == str(r["answer"])
        for n, r in zip(numbers, rows, strict=True)
    ]
    assert found["exact_match,flexible-extract"] == np.mean(right) > 0
    assert found["exact_match,strict-match"] == 0  # nothing here writes ####


def test_an_edited_model_is_evaluated_as_it_runs(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "c.jsonl", CHOICES)
    reference = Reference(model)

    def logits(ids: list[int]) -> Tensor:
        x = reference.embed(torch.tensor([ids]))
        x = reference.layer(0, x)
        x = x + reference.attention(1, x) + reference.attention(2, x)
        return reference.logits(x + reference.feed_forward(1, x) + reference.feed_forward(2, x))[0]

    surgeon.edit(model, "A0 F0 [A1 A2] [F1 F2]")
    found = answered(evaluate(model, tokenizer, path), "c")
    assert_scores(
        found[1:2],
        [[score(logits, tokenizer, "The dog went on", f" {c}") for c in CHOICES[1]["choices"]]],
    )


def contexts(results: dict[str, Any], task: str) -> list[str]:
    return [sample["arguments"][0][0] for sample in results["samples"][task]]


def test_few_shot_examples_are_other_rows(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"query": f"q{i}", "choices": [f"wrong{i}", f"right{i}"], "gold": 1} for i in range(5)]
    path = write_rows(tmp_path / "c.jsonl", rows)
    seen = contexts(evaluate(model, tokenizer, path, shots=2), "c")
    for i, context in enumerate(seen):
        *examples, question = context.split("\n\n")
        assert question == f"q{i}"
        assert len(set(examples)) == 2
        assert set(examples) <= {f"q{k} right{k}" for k in range(5) if k != i}
    assert contexts(evaluate(model, tokenizer, path, shots=2), "c") == seen
    assert contexts(evaluate(model, tokenizer, path, shots=4, limit=2), "c")[0].count("\n\n") == 4


def test_few_shot_examples_of_every_form(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    files: dict[str, list[Row]] = {"w": CONTEXTS, "l": CONTINUATIONS, "g": NUMBERS[:2]}
    paths = [write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in files.items()]
    results = evaluate(model, tokenizer, *paths, shots=1)
    assert contexts(results, "w")[0] == "the lazy went on sleeping\n\nThe fox saw it, and the dog"
    assert contexts(results, "l")[0] == "the dog went on sleeping: 123\n\nThe quick brown fox"
    example = "Question: two foxes\nAnswer: 6 and 6\nmake 12\n#### 12"
    assert contexts(results, "g")[0] == f"{example}\n\nQuestion: one dog\nAnswer:"
    assert results["n-shot"] == {"g": 1, "l": 1, "w": 1}


def test_texts_that_are_too_long_lose_their_beginning(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    long = "the dog " * POSITIONS + "The quick brown fox"
    path = write_rows(
        tmp_path / "l.jsonl", [{"context": long, "continuation": "jumps"}, CONTINUATIONS[1]]
    )
    results = evaluate(model, tokenizer, path)
    assert (results["lm"].cut, len(results["lm"].asked)) == (1, 2)
    ids = tokenizer(f"{long} jumps")["input_ids"]
    known = len(tokenizer(long)["input_ids"]) - len(ids)
    kept = ids[-(POSITIONS + 1) :]
    log_p = plain_logits(model)(kept[:-1]).log_softmax(-1)
    expected = sum(float(log_p[position, kept[position]]) for position in range(known, 0))
    assert answered(results, "l")[0][0][0] == pytest.approx(expected, rel=1e-4)
    path = write_rows(tmp_path / "g.jsonl", [dict(NUMBERS[0], context=long), NUMBERS[1]])
    assert evaluate(model, tokenizer, path)["lm"].cut == 1
    with pytest.raises(
        ValueError, match=r"the text to be scored ' the dog.* tokens, and the model only 128 positions"
    ):
        evaluate(
            model, tokenizer, write_rows(tmp_path / "x.jsonl", [{"context": "a", "continuation": long}])
        )


def test_a_text_without_tokens_is_refused(model: Any, tmp_path: Path) -> None:
    one_token = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=one_token, **names)
    with pytest.raises(ValueError, match="' jumps' has no tokens of its own"):
        evaluate(model, tokenizer, write_rows(tmp_path / "l.jsonl", CONTINUATIONS))


class Killed(BaseException):
    pass


def kill_after(model: Any, passes: int) -> Any:
    """Stop the model's forward pass like Ctrl-C does, after some of them; returns a handle to undo it."""
    left = [passes]

    def hook(*_: Any) -> None:
        if left[0] == 0:
            raise Killed
        left[0] -= 1

    return model.register_forward_pre_hook(hook)


def forward_passes(model: Any) -> tuple[list[int], Any]:
    count = [0]

    def hook(*_: Any) -> None:
        count[0] += 1

    return count, model.register_forward_pre_hook(hook)


def test_killed_and_started_again(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / "c.jsonl", CHOICES), write_rows(tmp_path / "l.jsonl", CONTINUATIONS)]
    whole = evaluate(model, tokenizer, *paths, batch_size=2)
    folder = tmp_path / "out"
    handle = kill_after(model, 2)
    with Answers(folder, {"model": 1}) as answers, pytest.raises(Killed):
        evaluate(model, tokenizer, *paths, batch_size=2, answers=answers)
    handle.remove()
    (file,) = folder.iterdir()
    assert len(file.read_text().splitlines()) == 4
    file.write_text(file.read_text() + '["cut off by')
    count, handle = forward_passes(model)
    with Answers(folder, {"model": 1}) as answers:
        again = evaluate(model, tokenizer, *paths, batch_size=2, answers=answers)
    handle.remove()
    assert again["results"] == whole["results"]
    assert again["samples"] == whole["samples"]
    total = len(whole["lm"].asked)
    assert len(file.read_text().splitlines()) == total
    assert count[0] == math.ceil((total - 4) / 2)
    with Answers(folder, {"model": 1}) as answers:
        assert kill_after(model, 0)
        assert evaluate(model, tokenizer, *paths, answers=answers)["results"] == whole["results"]


def test_answers_of_another_model_are_not_taken(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "c.jsonl", CHOICES)
    with Answers(tmp_path / "out", {"model": 1}) as answers:
        first = evaluate(model, tokenizer, path, answers=answers)
    with Answers(tmp_path / "out", {"model": 2}) as answers:
        other = evaluate(
            tiny_model("llama", 3, 1, vocab_size=len(tokenizer)), tokenizer, path, answers=answers
        )
    assert answered(first, "c") != answered(other, "c")
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_damaged_answers_and_two_at_once(tmp_path: Path) -> None:
    with Answers(tmp_path, {}) as answers:
        answers.add("key", [1.0, True])
        answers.write()
        with pytest.raises(OSError, match="another evaluation of this model is writing to"):
            Answers(tmp_path, {})
    answers.path.write_text("[1\n")
    with pytest.raises(ValueError, match="is damaged in line 1; delete the file to begin again"):
        Answers(tmp_path, {})


SAMPLING = """\
task: sampled
custom_dataset: !function code.rows
test_split: test
output_type: generate_until
doc_to_text: text
doc_to_target: text
repeats: 3
generation_kwargs: {do_sample: true, temperature: 2.0, max_gen_toks: 8, until: []}
filter_list: [{name: all, filter: [{function: take_first_k, k: 3}]}]
process_results: !function code.process_results
metric_list: [{metric: different, aggregation: mean, higher_is_better: true}]
"""
ROLLING = """\
task: rolling
custom_dataset: !function code.rows
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: byte_perplexity}]
"""
CODE = """\
from datasets import Dataset

def rows(**_):
    return {"test": Dataset.from_list([{"text": "The quick brown fox"}, {"text": "jumps over"}])}

def process_results(doc, results):
    return {"different": len(set(results[0]))}
"""


def test_sampled_answers_are_not_remembered(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "sampled.yaml").write_text(SAMPLING)
    with Answers(tmp_path / "out", {}) as answers:
        results = evaluate(model, tokenizer, tmp_path / "sampled.yaml", answers=answers)
    assert results["results"]["sampled"]["different,all"] == 3
    assert answers.path.read_text() == ""


def test_whole_texts(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "rolling.yaml").write_text(ROLLING)
    with Answers(tmp_path / "out", {}) as answers:
        results = evaluate(model, tokenizer, tmp_path / "rolling.yaml", answers=answers)
        kill_after(model, 0)
        assert (
            evaluate(model, tokenizer, tmp_path / "rolling.yaml", answers=answers)["results"]
            == results["results"]
        )
    logits, texts, total = plain_logits(model), ["The quick brown fox", "jumps over"], 0.0
    for text in texts:
        ids = tokenizer(text)["input_ids"]  # begins with BOS, and lm-eval puts one more before it
        log_p = logits([tokenizer.bos_token_id, *ids]).log_softmax(-1)
        total += sum(float(log_p[i, token]) for i, token in enumerate(ids))
    expected = math.exp(-total / sum(map(len, texts)))
    assert results["results"]["rolling"]["byte_perplexity,none"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"), [({"limit": 0}, "at least 1 row"), ({"batch_size": 0}, "at least 1, not 0")]
)
def test_settings_that_make_no_sense(settings: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TaskSettings(**settings)


def test_tokenizers_that_lack_something(model: Any, tmp_path: Path) -> None:
    bare: Any = tiny_tokenizer()
    with pytest.raises(ValueError, match="no chat template; leave the template out"):
        evaluate(model, bare, write_rows(tmp_path / "c.jsonl", CHOICES), chat=True)
    bare.eos_token = None
    with pytest.raises(
        ValueError, match="task g generates text, which needs a tokenizer that has an EOS"
    ):
        evaluate(model, bare, write_rows(tmp_path / "g.jsonl", NUMBERS))
    bare.bos_token = None
    with pytest.raises(ValueError, match="neither BOS nor EOS"):
        evaluate(model, bare, tmp_path / "c.jsonl")


def test_a_chat_template_is_used(model: Any, tmp_path: Path) -> None:
    chatty: Any = tiny_tokenizer()
    chatty.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    results = evaluate(
        model, chatty, write_rows(tmp_path / "c.jsonl", CHOICES[1:2] + CHOICES[3:]), shots=1, chat=True
    )
    assert (
        contexts(results, "c")[0]
        == "<user>The lazy dog<assistant>and the dog<user>The dog went on<assistant>"
    )
    assert results["chat_template"] == chatty.chat_template
