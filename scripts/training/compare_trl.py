"""Conversations' tokens, and which of them are trained on, held against TRL's on the same rows.

    python -m venv --system-site-packages env && env/bin/pip install trl
    env/bin/python scripts/training/compare_trl.py

Templates are those of models as TRL ships them, in the demo model's tokenizer with their special tokens added, so that
nothing is fetched. Of each there are three ways to give the rows:

    messages      in the model's template, which marks no answers. TRL puts a variant of its own in its place that does
    marked        in that variant, for both
    prompt        the last answer as the completion of what stands before it, in the model's template

and `texts` are prompts and completions in no template. Where the tokens of a row are the same, surgeon must not train
on any that TRL does not train on, and in `marked` and `texts` on exactly the same; what TRL trains on beyond that is
printed. It ends with 1 otherwise.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from surgeon.named import demo_model
from surgeon.quality.conversations import ConversationTokenizer, conversation_columns
from surgeon.quality.sources import Reading

NAMES = [
    "llama3",
    "qwen2_5",
    "qwen3_instruct_2507",
    "gemma",
    "phi3",
    "cohere",
    "lfm2",
    "gptoss",
    "qwen3",
    "deepseek_r1_distill",
]
SPECIAL = re.compile(r"<[|\uff5c][^|\uff5c<>]+[|\uff5c]>|<(?:start|end)_of_\w+>|</?think>")
WITHOUT_SYSTEM = ("gemma",)
Row = dict[str, Any]
Coded = list[tuple[list[int], list[int]]]  # of each row its tokens, and 1 for those that are trained on


def said(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation, of a user and an assistant in turn."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [
        {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)
    ]


CONVERSATIONS = [
    said("What is 2 + 2?", "4"),
    said("Bonjour à tous", "Schöne Grüße, 你好 🙂", "again", "é", "once more", "日本語"),
    said("def f(x):", "    return x\n\n\n", "And g?", "\n\ndef g(x):\n    return f(x)"),
    said(
        "Think.", "<think>\nlong\n</think>\n\nDone.", "More.", "<think>\nlonger\n</think>\n\nDone again."
    ),
    said("Hello", "Hi", "Bye", "Goodbye", system="Be quick."),
]
TEXTS = [
    ("def f(x):", "\n    return x"),
    ("2 + 2 =", " 4"),
    ("Grüße", ": é 🙂"),
    ("def f(x): return ", "self"),
]


def tokenizer(template: str, special: str) -> Any:
    """The demo's, with the special tokens of one template, in one."""
    found = AutoTokenizer.from_pretrained(demo_model())
    found.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL.findall(special)))})
    found.pad_token = found.eos_token
    found.chat_template = template
    return found


def by_trl(coded: Any, rows: list[Row], marks: bool) -> Coded:
    """What an SFTTrainer makes of rows."""
    trl = import_module("trl")
    config = LlamaConfig(
        vocab_size=len(coded),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    with TemporaryDirectory() as folder:
        settings = trl.SFTConfig(
            folder,
            max_length=None,
            assistant_only_loss=marks,
            use_cpu=True,
            bf16=False,
            report_to="none",
        )
        data = datasets.Dataset.from_list(rows)
        prepared = trl.SFTTrainer(
            LlamaForCausalLM(config), settings, train_dataset=data, processing_class=coded
        ).train_dataset
    return [(row["input_ids"], [int(label != -100) for label in row["labels"]]) for row in prepared]


def by_surgeon(coded: Any, rows: list[Row]) -> Coded:
    """What surgeon makes of them; nothing where a row is left out."""
    convert = ConversationTokenizer(coded, conversation_columns(rows[0]), 1 << 20, Reading())
    found: Coded = []
    for number, row in enumerate(rows):
        each = convert(row, f"row {number}")
        if each is None or each.answer is None:
            found.append(([], []))
        else:
            found.append((each.ids.tolist(), each.answer.astype(int).tolist()))
    return found


def ways(name: str) -> Iterator[tuple[str, Any, list[Row], bool]]:
    """Rows of a template in each way: its name, tokenizer, rows, and whether TRL is to go by marks."""
    folder = Path(str(files("trl"))) / "chat_templates"
    own, marked = ((folder / f"{name}{end}.jinja").read_text() for end in ("", "_training"))
    chosen = [
        each for each in CONVERSATIONS if name not in WITHOUT_SYSTEM or each[0]["role"] != "system"
    ]
    messages = [{"messages": each} for each in chosen]
    yield "messages", tokenizer(own, own), messages, True
    yield "marked", tokenizer(marked, own), messages, True
    yield (
        "prompt",
        tokenizer(own, own),
        [{"prompt": each[:-1], "completion": each[-1:]} for each in chosen],
        False,
    )


def compared(coded: Any, theirs: Coded, ours: Coded) -> tuple[list[int], Counter[str]]:
    """Rows of the same tokens, of them those of the same answers; tokens that both train on, TRL alone, surgeon alone.

    And which tokens TRL alone trains on.
    """
    same = [(ids, a, b) for (ids, a), (others, b) in zip(theirs, ours, strict=True) if ids == others]
    tokens = [
        (token, a, b)
        for ids, first, second in same
        for token, a, b in zip(ids, first, second, strict=True)
    ]
    numbers = [
        sum(bool(a and b) for _, a, b in tokens),
        sum(a > b for _, a, b in tokens),
        sum(b > a for _, a, b in tokens),
    ]
    alone = Counter(coded.decode([token]) for token, a, b in tokens if a > b)
    return [len(same), sum(a == b for _, a, b in same), *numbers], alone


def main() -> int:
    datasets.disable_progress_bars()
    print(f"TRL {version('trl')}, transformers {version('transformers')}")
    titles = (
        "template",
        "rows as",
        "rows",
        "same tokens",
        "same answers",
        "trained by both",
        "by TRL only",
        "by surgeon only",
    )
    print("| " + " | ".join(titles) + " | which |\n" + "|:--|:--" + "|--:" * (len(titles) - 2) + "|:--|")
    wrong = 0
    cases = [(name, *way) for name in NAMES for way in ways(name)]
    texts = [{"prompt": prompt, "completion": completion} for prompt, completion in TEXTS]
    cases.append(("none", "texts", tokenizer(None, ""), texts, False))
    for name, way, coded, rows, marks in cases:
        numbers, alone = compared(coded, by_trl(coded, rows, marks), by_surgeon(coded, rows))
        which = ", ".join(f"{token!r} {count}" for token, count in alone.most_common())
        print("| " + " | ".join(map(str, (name, way, len(rows), *numbers, which))) + " |", flush=True)
        exactly = way in ("marked", "texts")
        wrong += numbers[-1] > 0 or (exactly and numbers[:2] != [len(rows)] * 2)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
