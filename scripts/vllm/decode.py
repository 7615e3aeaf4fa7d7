"""Decoding speed of a checkpoint in vLLM; engine.py runs it on CPUs, scripts/gpu/check on a GPU.

    python scripts/vllm/decode.py MODEL RANKS PROMPT NEW ROUNDS BATCH [BATCH ...] [--dtype DTYPE]
        [--additional-config JSON]

On CPUs the environment has VLLM_CPU_KVCACHE_SPACE=1 and, for two ranks, VLLM_CPU_OMP_THREADS_BIND="0|1". Token ids are
random. Among what vLLM prints is one line of JSON: new tokens per second after the first, the median over the rounds,
by batch.
"""

import argparse
import json
import random
import statistics
import time

from vllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("ranks", "prompt", "new", "rounds"):
        parser.add_argument(name, type=int)
    parser.add_argument("batches", type=int, nargs="+")
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
        max_model_len=options.prompt + options.new,
        max_num_seqs=max(options.batches),
        additional_config=options.additional_config,
    )
    sizes = options.prompt, options.new, options.rounds
    rates = {batch: statistics.median(decoding_rates(engine, batch, *sizes)) for batch in options.batches}
    print(json.dumps(rates))


def decoding_rates(engine: LLM, batch: int, prompt: int, new: int, rounds: int) -> list[float]:
    """Tokens per second, by round."""
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    numbers = random.Random(0)
    texts = [{"prompt_token_ids": [numbers.randrange(vocabulary) for _ in range(prompt)]} for _ in range(batch)]

    def seconds(tokens: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        engine.generate(texts, sampling, use_tqdm=False)
        return time.perf_counter() - began

    seconds(2)
    return [batch * (new - 1) / (seconds(new) - seconds(1)) for _ in range(rounds)]


if __name__ == "__main__":
    main()
