"""The table of two servers, and how they are started; the servers themselves are started by the script only."""

from __future__ import annotations

from scripts.bench.served import FIGURES, Load, command_of, environment, options_of, table_of

LOADS = [Load(8, 0), Load(8, 48)]


def found(throughput: float, first: float) -> dict[str, float]:
    return dict.fromkeys(FIGURES, first) | {"output_throughput": throughput}


def test_medians_and_how_many_times_better() -> None:
    rounds = {
        ("surgeon", LOADS[0]): [found(30, 10), found(50, 5), found(40, 90)],
        ("vllm", LOADS[0]): [found(20, 20)] * 3,
        ("surgeon", LOADS[1]): [found(7, 7)],
    }
    lines = table_of(rounds, LOADS, 64).splitlines()
    assert lines[0] == "| load | server | tokens/s | first 50% | first 99% | each 50% | each 99% |"
    assert lines[2:] == [
        "| 8 clients, nothing shared | surgeon | 40.0 | 10.0 | 10.0 | 10.0 | 10.0 |",
        "| 8 clients, nothing shared | vllm | 20.0 | 20.0 | 20.0 | 20.0 | 20.0 |",
        "|  | better | 2.00x | 2.00x | 2.00x | 2.00x | 2.00x |",
        "| 8 clients, 48 of 64 tokens shared | surgeon | 7.0 | 7.0 | 7.0 | 7.0 | 7.0 |",
    ]


def test_both_get_the_same_limits_and_only_this_machine_reaches_them() -> None:
    options = options_of(
        ["--model", "m", "--max-batch", "4", "--prompt", "64", "--new", "8", "--ranks", "1"]
    )
    ours, theirs = (" ".join(command_of(server, options, 1234)) for server in ("surgeon", "vllm"))
    assert "serve m --tp 1 --port 1234 --served-model-name served --max-batch 4 --max-tokens 80" in ours
    assert (
        "vllm.entrypoints.openai.api_server --model m --tensor-parallel-size 1 --dtype float32" in theirs
    )
    assert (
        "--host 127.0.0.1 --port 1234 --served-model-name served --max-num-seqs 4 --max-model-len 80"
        in theirs
    )
    assert "|" not in environment(options)["VLLM_CPU_OMP_THREADS_BIND"]
    assert options.vllm_python.is_absolute()
