"""Writes what scripts/modeling/test checks: tiny checkpoints of all architectures in every form, and what they compute.

    python scripts/modeling/cases.py FOLDER

Expected logits are those of tests/checkpoint/helpers.py's plain computation, which uses neither surgeon's executor nor
the modeling code of transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the tests' tiny models

import surgeon
from surgeon.exports.export import plan_export, write_export
from surgeon.language.program import Program
from surgeon.models.families import FAMILIES, Family
from surgeon.opened import open_model
from tests.checkpoint.helpers import IDS, plain_logits, save_source

NEW_TOKENS = 8
# Layers that are fused have one kind of attention.
PAIRS = dict.fromkeys(("gpt_neo", "smollm3", "cohere2", "ministral"), (1, 3))
DEFAULT_PAIR = (2, 3)
SET: dict[str, dict[str, Any]] = {
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},  # transformers 5.16 reads no others
    # Linear attention is neither sliced nor fused nor averaged.
    "qwen3_5_text": {"layer_types": ["full_attention", "linear_attention", *["full_attention"] * 2]},
}


def programs_of(family: Family) -> dict[str, str]:
    """A program for each form that can hold one of this architecture."""
    first, second = PAIRS.get(family.model_type, DEFAULT_PAIR)
    plain = "A0 F0 A2 F2 A1 F1" if family.steps_per_layer == 2 else "[A0 F0] [A2 F2] [A1 F1]"
    pair = f"[A{first} A{second}] [F{first} F{second}]"
    # Mixtures have no averages, and no factors where heads share what they have.
    if family.mixture is not None:
        first = "A0@q5,v3" if family.attention.kept is None else "A0"
        return {
            "plain": plain,
            "program": f"{first} F0 >A1 >F1!e0,e3 {{A2 F2 | A0 F1}} A0~A1 >[A2 A3] >[F2 F3!e1,e2]",
        }
    if family.mlp.norms_output:  # neither slices nor fusing are exact then
        return {"plain": plain, "program": f"A0@q5,v3 F0 >A1 >F1@up9,down7 {{A2 F2 | A0 F1}} >{pair}"}
    sliced = "{A2/2:0 F2/2:0 | A2/2:1 F2/2:1}"
    fused = (
        f"A0 F0 {pair}"
        if family.steps_per_layer == 2
        else f"[A0 F0] [A{first} F{first} A{second} F{second}]"
    )
    return {
        "plain": plain,
        "program": f"A0@q5,v3 F0 >A1 >F1@up9,down7 {sliced} A0~A2 {pair}",
        "fused": fused,
    }


def write_cases(folder: Path) -> None:
    """Write the checkpoints, cases.json and expected.pt."""
    cases: list[dict[str, str]] = []
    expected: dict[str, dict[str, Any]] = {}
    for model_type, family in FAMILIES.items():
        source = folder / f"{model_type}-source"
        model = save_source(source, model_type, num_layers=4, **SET.get(model_type, {}))
        for form, program in programs_of(family).items():
            if form == "fused" and family.unfusable(model.config):
                continue
            name = f"{model_type}-{form}"
            plan = plan_export(open_model(source), Program.parse(program), form)
            write_export(plan, folder / name, overwrite=True)
            edited = surgeon.edit(surgeon.load(source), program)
            tokens = edited.generate(
                IDS, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            expected[name] = {"logits": plain_logits(model, program), "tokens": tokens}
            cases.append({"name": name, "form": form})
            print(f"{name}: {program}", flush=True)
    torch.save({"ids": IDS, "expected": expected}, folder / "expected.pt")
    (folder / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_cases(Path(sys.argv[1]))
