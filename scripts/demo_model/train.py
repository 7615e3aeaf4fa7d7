#!/usr/bin/env python3
"""Train the demo model that ships in surgeon/demo/model: a small deep Llama on the standard library's own source.

    python scripts/demo_model/train.py                    # about an hour on two cores
    python scripts/demo_model/train.py --steps 20 -o /tmp/demo-model   # does the script work at all?

The run can be killed at any point: the same command goes on from the last saved step (every 100 steps, in OUT/state)
and takes the same batches in the same order. When it ends, it writes weights, tokenizer, configuration and
training.json (data, steps, held-out perplexity), and removes the state.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from surgeon.demo import library_text
from surgeon.processes.files import whole_file
from surgeon.progress import progress

CONTEXT = 512
BATCH = 8
WARMUP = 100
VOCABULARY = 2048


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 2,048 entries that begins every text with <s>, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def build_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.03,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Every text as <s> text </s>, one after the other."""
    ids = tokenizer(texts, add_special_tokens=True)["input_ids"]
    return torch.tensor([token for document in ids for token in [*document, tokenizer.eos_token_id]])


def batch_at(step: int, stream: torch.Tensor, seed: int) -> torch.Tensor:
    """The batch of this step, (BATCH, CONTEXT): every window once per epoch, cut at an offset new in each epoch."""
    windows = (len(stream) - CONTEXT) // CONTEXT
    steps_per_epoch = windows // BATCH
    epoch, place = divmod(step, steps_per_epoch)
    generator = torch.Generator().manual_seed(seed * 1000 + epoch)
    offset = int(torch.randint(CONTEXT, (1,), generator=generator))
    order = torch.randperm(windows, generator=generator)[place * BATCH : (place + 1) * BATCH]
    return torch.stack([stream[offset + i * CONTEXT :][:CONTEXT] for i in order.tolist()])


def learning_rate_at(step: int, steps: int, peak: float) -> float:
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def build_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


@torch.no_grad()
def held_out_perplexity(model: LlamaForCausalLM, stream: torch.Tensor) -> float:
    """Exp of the mean negative log-likelihood per predicted token over windows of CONTEXT tokens."""
    windows = stream[: len(stream) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    losses = [
        model(input_ids=chunk, labels=chunk).loss.item() * len(chunk) for chunk in windows.split(BATCH)
    ]
    return math.exp(sum(losses) / len(windows))


def train(
    args: argparse.Namespace, model: LlamaForCausalLM, stream: torch.Tensor, held_out: torch.Tensor
) -> float:
    """Train to the last step; returns the seconds this call took."""
    optimizer = build_optimizer(model)
    state = args.output / "state" / "training.pt"
    state.parent.mkdir(parents=True, exist_ok=True)
    start = 0
    if state.exists():
        saved = torch.load(state)
        start = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    begun = time.monotonic()
    with progress("training", args.steps, "steps", start) as advance:
        for step in range(start, args.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, args.steps, args.learning_rate)
            batch = batch_at(step, stream, args.seed)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            advance(1)
            if (step + 1) % 100 == 0:
                saved = {"step": step + 1, "model": model.state_dict()}
                with whole_file(state) as beside:
                    torch.save(saved | {"optimizer": optimizer.state_dict()}, beside)
                perplexity = held_out_perplexity(model, held_out[: 32 * CONTEXT])
                print(
                    f"step {step + 1}: loss {loss.item():.3f}, held-out perplexity {perplexity:.2f} (32 windows), "
                    f"{time.monotonic() - begun:.0f} s"
                )
    return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).resolve().parents[2] / "surgeon" / "demo" / "model"
    parser.add_argument("-o", "--output", type=Path, default=default)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    texts = library_text(held_out=False)
    held_out_texts = library_text(held_out=True)
    tokenizer = train_tokenizer(texts)
    stream = token_stream(tokenizer, texts)
    held_out = token_stream(tokenizer, held_out_texts)
    model = build_model(args.seed)
    print(
        f"{model.num_parameters():,} parameters, {len(stream):,} training tokens, {len(held_out):,} held out"
    )
    seconds = train(args, model, stream, held_out)
    facts = {
        "data": f"standard library of Python {platform.python_version()}, tests and data tables left out",
        "training_tokens": len(stream),
        "held_out_tokens": len(held_out),
        "steps": args.steps,
        "tokens_per_step": BATCH * CONTEXT,
        "parameters": model.num_parameters(),
        "peak_learning_rate": args.learning_rate,
        "seed": args.seed,
        "seconds_of_last_run": round(seconds),
        "held_out_perplexity_float32": round(held_out_perplexity(model, held_out), 3),
    }
    model.to(torch.bfloat16).save_pretrained(args.output)
    facts["held_out_perplexity"] = round(held_out_perplexity(model.float(), held_out), 3)
    tokenizer.save_pretrained(args.output)
    (args.output / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    shutil.rmtree(args.output / "state")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
