"""vLLM as a process that measures what it is asked to; engine.py and scripts/gpu/check run it with vLLM's Python.

    python scripts/vllm/cells.py MODEL RANKS LONGEST BATCH [--dtype DTYPE] [--additional-config JSON]

LONGEST is the most tokens of a text with its continuation, BATCH the most texts at a time. Every line of the input
says how many texts, tokens of a prompt and new tokens; the answer is a line of JSON behind a mark: seconds to the first
new token of every text, and of each pass after that in which all of them got one. Random token ids, greedy. On CPUs the
environment has VLLM_CPU_KVCACHE_SPACE=1 and, for two ranks, VLLM_CPU_OMP_THREADS_BIND="0|1".
"""

import argparse
import json
import random
import sys
import time

from vllm import LLM, SamplingParams

MARK = "CELL "  # vLLM prints, too


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("ranks", "longest", "batch"):
        parser.add_argument(name, type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--additional-config", type=json.loads, default={})
    options = parser.parse_args()
    engine = LLM(
        model=options.model,
        dtype=options.dtype,
        tensor_parallel_size=options.ranks,
        skip_tokenizer_init=True,
        trust_remote_code=True,
        enable_prefix_caching=False,
        max_model_len=options.longest,
        max_num_seqs=options.batch,
        additional_config=options.additional_config,
    )
    print(f"{MARK}null", flush=True)
    for number, line in enumerate(sys.stdin):
        print(MARK + json.dumps(measured(engine, f"{number}-", *map(int, line.split()))), flush=True)


def measured(engine: LLM, name: str, batch: int, prompt: int, new: int) -> tuple[float, list[float]]:
    """Seconds to the first token of every text, and of each later pass of all texts."""
    numbers = random.Random(0)
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    texts = [[numbers.randrange(vocabulary) for _ in range(prompt)] for _ in range(batch)]
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    began = ended = time.perf_counter()
    for place, text in enumerate(texts):
        engine.llm_engine.add_request(f"{name}{place}", {"prompt_token_ids": text}, sampling)
    first = 0.0
    passes = []
    begun = set()
    while engine.llm_engine.has_unfinished_requests():
        outputs = engine.llm_engine.step()
        if not outputs:
            continue
        before = ended
        ended = time.perf_counter()
        if len(begun) == batch and len(outputs) == batch:
            passes.append(ended - before)
        begun |= {output.request_id for output in outputs}
        if len(begun) == batch and not first:
            first = ended - began
    return first, passes


if __name__ == "__main__":
    main()
