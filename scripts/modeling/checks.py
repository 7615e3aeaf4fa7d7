"""Checks the modeling files inside checkpoints, where there is no surgeon: only torch, transformers, accelerate, peft.

    python scripts/modeling/checks.py FOLDER

FOLDER is what scripts/modeling/cases.py wrote. Every check of every checkpoint is run; those that fail are named, and
the exit status is 1.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

TOLERANCE = 1e-5  # of the largest logit
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@dataclass
class Case:
    """One checkpoint, with what it should compute."""

    folder: Path
    form: str
    ids: Tensor
    logits: Tensor
    tokens: Tensor

    @property
    def new_tokens(self) -> int:
        return self.tokens.shape[1] - self.ids.shape[1]

    def load(self, folder: Path | None = None, **options: Any) -> Any:
        """The model, as a user loads it."""
        if self.form != "plain":
            options["trust_remote_code"] = True
        options.setdefault("dtype", torch.float32)
        # Transformers 5.16 leaves the cap on attention scores out of sdpa.
        if "gemma2" in self.folder.name:
            options["attn_implementation"] = "eager"
        return AutoModelForCausalLM.from_pretrained(folder or self.folder, **options).eval()

    @torch.no_grad()
    def error(self, model: Any) -> float:
        """How far the model's logits are from the expected ones, relative to their scale."""
        return (
            (model(input_ids=self.ids).logits - self.logits).abs().max() / self.logits.abs().max()
        ).item()

    def generate(self, model: Any, ids: Tensor | None = None, **options: Any) -> Tensor:
        """The prompt and its continuation."""
        ids = self.ids if ids is None else ids
        options.setdefault("attention_mask", torch.ones_like(ids))
        tokens: Tensor = model.generate(ids, max_new_tokens=self.new_tokens, **GREEDY, **options)
        return tokens


def check_refused_without_trust(case: Case) -> None:
    if case.form == "plain":
        return
    try:
        AutoModelForCausalLM.from_pretrained(case.folder, trust_remote_code=False)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = "it loads"
    assert "trust_remote_code=True" in refusal, refusal


def check_logits(case: Case) -> None:
    for attention in ("sdpa", "eager"):
        try:
            model = case.load(attn_implementation=attention)
        except ValueError:  # GPT-Neo has eager attention only
            assert attention == "sdpa"
            continue
        error = case.error(model)
        assert error < TOLERANCE, f"{attention}: {error:.2g}"


def check_generation(case: Case) -> None:
    model = case.load()
    assert torch.equal(case.generate(model), case.tokens)
    assert torch.equal(case.generate(model, use_cache=False), case.tokens)
    # Two stock classes are left out: GPT-Neo's computes something else with a static cache, Llama 4's fails in
    # transformers 5.16.
    if not case.folder.name.startswith(("gpt_neo-", "llama4_text-")):
        assert torch.equal(case.generate(model, cache_implementation="static"), case.tokens), (
            "static cache"
        )
    # Beams are judged by their scores, as either of two that are equal may be kept.
    for cached in (True, False):
        options = {"return_dict_in_generate": True, "output_scores": True, "use_cache": cached}
        beams: Any = case.generate(model, num_beams=3, **options)
        with torch.no_grad():
            likely = model(input_ids=beams.sequences).logits[:, :-1].log_softmax(-1)
        scores = likely.gather(-1, beams.sequences[:, 1:, None])[:, -case.new_tokens :].mean((1, 2))
        assert torch.allclose(beams.sequences_scores, scores, atol=1e-4), "beams"


def check_padding(case: Case) -> None:
    model = case.load()
    short = case.ids[:1, 4:]
    ids = torch.cat([nn.functional.pad(short, (4, 0)), case.ids[1:2]])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    tokens = case.generate(model, ids, attention_mask=mask)
    assert torch.equal(tokens[0, 4:], case.generate(model, short)[0])
    assert torch.equal(tokens[1], case.tokens[1])


def check_saved_again(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        case.load().save_pretrained(folder)
        again = case.load(Path(folder))
        assert case.error(again) < TOLERANCE
        assert torch.equal(case.generate(again), case.tokens)


def check_bfloat16(case: Case) -> None:
    # Products over all experts at once want rows of 16 bytes, and these are smaller.
    error = case.error(case.load(dtype=torch.bfloat16, experts_implementation="eager"))
    assert error < 0.25, f"{error:.2g}"  # Gemma 3: 0.22 on AVX2


def check_gradients(case: Case) -> None:
    model = case.load().train()
    found = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(0)  # the same dropout
        model(input_ids=case.ids, labels=case.ids).loss.backward()
        found.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
        model.gradient_checkpointing_enable()
    assert found[0]
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][name], atol=1e-5), f"with checkpointing, {name}"


def check_lora(case: Case) -> None:
    model = case.load()
    # They go by their whole names, as what is one matrix in a layer may be two factors in another. Llama 4's routers,
    # which are linear layers too, give what no adapter can take.
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and not name.endswith("router")
    }
    torch.manual_seed(0)
    options = LoraConfig(target_modules=sorted(linear - {"lm_head"}), r=2, init_lora_weights=False)
    lora = get_peft_model(copy.deepcopy(model), options)
    lora(input_ids=case.ids, labels=case.ids).loss.backward()
    assert any(p.grad is not None for p in lora.parameters())
    with torch.no_grad():
        adapted = lora.eval()(input_ids=case.ids).logits
        assert (adapted - case.logits).abs().max() > 1e-2
        merged = lora.merge_and_unload()(input_ids=case.ids).logits
    # Sums are in another order; processors differ by as much as the tolerance.
    assert (adapted - merged).abs().max() < 2 * TOLERANCE * adapted.abs().max()


def check_disk(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # This is less than all layers need, so that some go to the disk.
        bytes_of_model = sum(parameter.numel() * 4 for parameter in case.load().parameters())
        memory = {"cpu": int(0.8 * bytes_of_model)}
        model = case.load(device_map="auto", max_memory=memory, offload_folder=folder)
        assert "disk" in model.hf_device_map.values(), model.hf_device_map
        assert case.error(model) < TOLERANCE


CHECKS: tuple[Callable[[Case], None], ...] = (
    check_refused_without_trust,
    check_logits,
    check_generation,
    check_padding,
    check_saved_again,
    check_bfloat16,
    check_gradients,
    check_lora,
    check_disk,
)


def run(folder: Path) -> int:
    """Run every check on every checkpoint; returns how many failed."""
    held = torch.load(folder / "expected.pt")
    failures = 0
    for entry in json.loads((folder / "cases.json").read_text()):
        expected = held["expected"][entry["name"]]
        case = Case(folder / entry["name"], entry["form"], held["ids"], **expected)
        failed = []
        for check in CHECKS:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            try:
                check(case)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other checks go on
                failed.append(
                    f"{name} ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
                )
        failures += len(failed)
        print(f"{entry['name']:20} {'; '.join(failed) or 'passed'}", flush=True)
    return failures


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}: {len(CHECKS)} checks each"
    )
    failures = run(Path(sys.argv[1]))
    print(f"{failures} checks failed" if failures else "all checks passed")
    sys.exit(failures > 0)
