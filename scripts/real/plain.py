"""What transformers and PyTorch alone make of a model, for scripts/real/check: a process in which there is no surgeon.

    python -I scripts/real/plain.py MODEL

MODEL is a folder or a .gguf file, of Llama's architecture. Every line of standard input is a question, a JSON object of
its name and arguments; every line of standard output the answer. Weights are bfloat16 and computed with in float32.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


class Plain:
    """The model, as transformers loads it."""

    def __init__(self, path: Path) -> None:
        gguf = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **gguf)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **gguf).eval()
        for parameter in self.model.parameters():
            parameter.copy_(parameter.bfloat16())  # which a .gguf file's are not yet

    def logits(self, ids: Tensor, program: str | None) -> Tensor:
        """Of the model, or of its sublayers in the order and side by side as a program says."""
        if program is None:
            found: Tensor = self.model(ids, use_cache=False).logits
            return found
        inner = self.model.model
        stream = before = inner.embed_tokens(ids)
        rotary = inner.rotary_emb(stream, torch.arange(ids.shape[1])[None])
        for late, together, alone in re.findall(r"(>?)(?:\[([^]]*)\]|([AF]\d+))", program):
            read = before if late else stream
            before = stream
            for kind, number in re.findall(r"([AF])(\d+)", together or alone):
                layer = inner.layers[int(number)]
                if kind == "A":
                    normed = layer.input_layernorm(read)
                    added = layer.self_attn(normed, position_embeddings=rotary, attention_mask=None)[0]
                else:
                    added = layer.mlp(layer.post_attention_layernorm(read))
                stream = stream + added
        logits: Tensor = self.model.lm_head(inner.norm(stream))
        return logits

    def perplexity(
        self, text: str, tokens: int, window: int, after: int = 0, program: str | None = None
    ) -> float:
        """On windows of a text file, behind its first tokens."""
        ids = self.tokenizer(Path(text).read_text(encoding="utf-8")[: 20 * (after + tokens)])[
            "input_ids"
        ]
        losses = []
        for row in torch.tensor(ids[after : after + tokens]).view(-1, 1, window):
            logits = self.logits(row, program)[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, row[0, 1:]))
        return float(torch.stack(losses).mean().exp())

    def exported(self, folder: str, program: str, text: str) -> dict[str, Any]:
        """How far the logits of a checkpoint, with the code inside, are from those of a program, over their largest."""
        loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).float().eval()
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        wanted = self.logits(ids, program)
        error = (loaded(ids, use_cache=False).logits - wanted).abs().max() / wanted.abs().max()
        return {"error": float(error), "class": type(loaded).__name__}

    def greedy(self, prompts: list[str], new: int) -> list[str]:
        """What the model writes after each prompt."""
        texts = []
        for prompt in prompts:
            asked = self.tokenizer(prompt, return_tensors="pt")
            tokens = self.model.generate(**asked, do_sample=False, max_new_tokens=new)
            texts.append(
                self.tokenizer.decode(tokens[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
            )
        return texts

    def likelihoods(self, rows: list[dict[str, Any]]) -> list[list[float]]:
        """The log-probability of each choice behind its question, of each row."""
        found = []
        for row in rows:
            before = len(self.tokenizer(row["query"])["input_ids"])
            scores = []
            for choice in row["choices"]:
                ids = torch.tensor(self.tokenizer(f"{row['query']} {choice}")["input_ids"])[None]
                likely = self.model(ids).logits.log_softmax(-1)[0, before - 1 : -1]
                scores.append(float(likely.gather(-1, ids[0, before:, None]).sum()))
            found.append(scores)
        return found


@torch.no_grad()
def main() -> None:
    sys.modules["surgeon"] = None  # type: ignore[assignment]  # whoever imports it from here on fails
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    plain = Plain(Path(sys.argv[1]))
    for line in sys.stdin:
        question = json.loads(line)
        name = question.pop("ask")
        try:
            answer: Any = {"found": getattr(plain, name)(**question)}
        except Exception as error:  # noqa: BLE001 - the other questions go on
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
