"""Folders as surgeon's commands write them, made up."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surgeon.version import FORMAT

BASE = 10.0
ALL = (
    "shuffle",
    "prune",
    "merge",
    "parallel",
    "2-parallel",
    "3-parallel",
    "lp",
    "ladder",
    "prune-attention",
    "prune-mlp",
)
Cell = dict[str, Any]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def record(model: str = "tiny", model_hash: str = "a" * 64, **more: Any) -> dict[str, Any]:
    """What `surgeon.opened` writes."""
    own = {
        "format": FORMAT,
        "command": f"surgeon something {model}",
        "model": model,
        "model_hash": model_hash,
        "seed": 3,
        "data": "text.txt",
        "data_hash": "d" * 64,
        "tokens_predicted": 4000,
        "versions": {"surgeon": "0.0.0-test", "torch": "9.9.9"},
    }
    return own | more


def ratio_of(operation: str, first: int, last: int) -> float:
    """How much worse than the base a stretch is: layer 0 and layer 5 matter, later layers less, pairs least."""
    length = last - first + 1
    harm = {"prune": 0.05, "lp": 0.004, "2-parallel": 0.005, "merge": 0.07}.get(operation, 0.02)
    extra = (3.0 if first == 0 else 0.0) + (0.4 if first <= 5 <= last else 0.0)
    extra *= {"lp": 0.5}.get(operation, 1.0)
    return 1 + harm * length**1.5 * (1 + 0.1 * ((7 * first + 3 * last) % 5)) + extra


def scan_cells(operations: tuple[str, ...], num_layers: int) -> list[Cell]:
    cells = []
    for operation in operations:
        for first in range(num_layers):
            for last in range(first, num_layers):
                size = {"lp": 2, "2-parallel": 2, "3-parallel": 3}.get(operation, 1)
                changed = (last - first + 1) // size * size
                lone = last == first and operation in ("shuffle", "merge", "parallel")
                nothing = changed == 0 or lone
                ratio = 1.0 if nothing else ratio_of(operation, first, first + changed - 1)
                cells.append(
                    {
                        "operation": operation,
                        "first": first,
                        "last": last,
                        "perplexity": f"{BASE * ratio:.9g}",
                        "perplexity_low": f"{BASE * ratio * 0.9:.9g}",
                        "perplexity_high": f"{BASE * ratio * 1.1:.9g}",
                        "divergence": f"{0 if nothing else 0.1 * (ratio - 1):.9g}",
                        "divergence_low": f"{0 if nothing else 0.08 * (ratio - 1):.9g}",
                        "divergence_high": f"{0 if nothing else 0.12 * (ratio - 1):.9g}",
                        "tokens": 4000,
                        "sublayers_run": 2,
                    }
                )
    return cells


def make_scan(
    folder: Path,
    operations: tuple[str, ...] = ("prune", "lp"),
    num_layers: int = 12,
    change: Callable[[list[Cell]], object] = lambda _: None,
    **more: Any,
) -> Path:
    """A scan; `change` may do something to its cells, `more` goes into its record."""
    folder.mkdir()
    cells = scan_cells(operations, num_layers)
    change(cells)
    write_csv(folder / "cells.csv", cells)
    counts = {"base": 2 * num_layers}
    own = {
        "base_perplexity": BASE,
        "base_interval": [9.0, 11.0],
        "sublayers_run": counts,
        "operations": list(operations),
    }
    (folder / "scan.json").write_text(json.dumps(record(**(own | more))))
    return folder


def make_similarity(folder: Path, num_layers: int = 6, **more: Any) -> Path:
    folder.mkdir()
    cka = [float("nan"), 0.2, 0.9, 0.95, 0.7, 0.6, *(0.5 - 0.01 * k for k in range(num_layers))][
        :num_layers
    ]
    names = ("cka_attention", "cka_attention_debiased", "cka_mlp", "cka_mlp_debiased")
    layers = [
        {
            "layer": k,
            **dict.fromkeys(names, value),
            "block_influence": 0.1 + k,
            "attention_size": 0.2,
            "mlp_size": 0.3,
        }
        for k, value in enumerate(cka)
    ]
    write_csv(folder / "similarity.csv", layers)
    stretches = [(first, last) for first in range(num_layers) for last in range(first, num_layers)]
    distances = [
        {"first": f, "last": e, "angular_distance": 0.01 * (e - f + 1) + 0.001 * f, "angular_distance_last_token": 0.5,
         "cosine_distance": 0.1}
        for f, e in stretches
    ]  # fmt: skip
    write_csv(folder / "distances.csv", distances)
    rho = {
        ("length", ""): (0.5, 0.6),
        ("block_influence", "sum"): (0.8, 0.7),
        ("cka_attention", "max"): (0.6, 0.95),
    }
    proxies = [
        {"operation": operation, "damage": damage, "proxy": proxy, "aggregate": aggregate, "p": 0.1, "n": 9,
         "rho": values[place] * (1 if damage == "divergence" else -1), "rho_at_equal_length": 0.1}
        for (proxy, aggregate), values in rho.items()
        for place, operation in enumerate(("prune", "lp"))
        for damage in ("divergence", "log_perplexity_ratio")
    ]  # fmt: skip
    write_csv(folder / "proxies.csv", proxies)
    (folder / "similarity.json").write_text(json.dumps(record(**more)))
    return folder


def make_sensitivity(folder: Path, num_layers: int = 6, **more: Any) -> Path:
    folder.mkdir()
    rows = []
    for first in range(num_layers - 1):
        size = 5.0 - first if first else 50.0
        rows.append(
            {"first": first, "last": first + 1, "bound": 20 * size, "error": size, "relative_bound": 2 * size,
             "relative_first_order": 0.11 * size, "relative_error": 0.1 * size, "perplexity": 10 + size,
             "divergence": 0.01 * size, "divergence_low": 0.009 * size, "divergence_high": 0.011 * size}
        )  # fmt: skip
    write_csv(folder / "sensitivity.csv", rows)
    found = [
        {"predictor": "bound", "damage": "divergence", "rho": 0.93, "p": 0.1, "n": 5},
        {"predictor": "first_order", "damage": "divergence", "rho": 0.99, "p": 0.1, "n": 5},
    ]
    own = {"base_perplexity": BASE, "errors_within_bound": 10, "errors": 10, "correlations": found}
    (folder / "sensitivity.json").write_text(json.dumps(record(**(own | more))))
    return folder


def make_spectrum(folder: Path, num_layers: int = 6, **more: Any) -> Path:
    folder.mkdir()
    weights = {"q": 16, "down": 64}
    matrices = [
        {"layer": layer, "weight": name, "full_rank": full, "rank95": full // 2, "kept95": 0.9,
         "rank95_whitened": full // (8 if name == "q" else 4), "kept95_whitened": 0.4}
        for layer in range(num_layers)
        for name, full in weights.items()
    ]  # fmt: skip
    write_csv(folder / "spectrum.csv", matrices)
    damage = [
        {"layer": layer, "weight": name, "method": "whitened", "rank": full // part, "full_rank": full,
         "kept": 1 / part,
         "perplexity": BASE * (1 + 0.01 * part + (0.5 if (layer, name, part) == (2, "down", 8) else 0)),
         "perplexity_low": 9, "perplexity_high": 11,
         "divergence": 0.01 * part, "divergence_low": 0, "divergence_high": 1, "tokens": 4000}
        for layer in range(num_layers)
        for name, full in weights.items()
        for part in (8, 2)
    ]  # fmt: skip
    write_csv(folder / "damage.csv", damage)
    own = {"base_perplexity": BASE, "ranks": ["1/8", "1/2"]}
    (folder / "spectrum.json").write_text(json.dumps(record(**(own | more))))
    return folder


def make_search(folder: Path, recipe: str = "surgeon: 1\nmodel: tiny\n", **more: Any) -> Path:
    folder.mkdir()
    found = [("window", 1, 0.05), ("additive", 2, 0.04), ("neighbour", 3, 0.03), ("sampled", 0, 3.0)]
    trials = [
        {"trial": number, "source": source, "level": "", "edits": f"pair {first}:{first + 2}", "depth": 5.0,
         **quality_of(divergence), "whole": source != "sampled", "within": source != "sampled",
         "program": paired(first)}
        for number, (source, first, divergence) in enumerate(found)
    ]  # fmt: skip
    write_csv(folder / "trials.csv", trials)
    terms = [
        {"edit": f"pair {k}:{k + 2}", "space": "pair", "first": k, "last": k + 1, "option": "",
         "divergence": 0.01 * (k + 1)}
        for k in range(5)
    ]  # fmt: skip
    write_csv(folder / "terms.csv", terms)
    (folder / "recipe.yaml").write_text(recipe)
    own = {
        "objective": "divergence",
        "budget": "depth=5",
        "num_layers": 6,
        "steps_per_layer": 2,
        "best": {"trial": 2, "why": "The best within depth=5", "program": paired(3), **quality_of(0.03)},
        "original": quality_of(0.0),
        "held_out": held_out(),
    }
    (folder / "search.json").write_text(json.dumps(record(**(own | more))))
    return folder


def quality_of(divergence: float) -> Cell:
    ends = {"divergence_low": divergence * 0.9, "divergence_high": divergence * 1.1}
    return {"divergence": divergence, **ends, "perplexity": 10 + divergence * 10, "tokens": 4000}


def paired(first: int) -> str:
    """Six layers, two of which are a pair."""
    layers = [f"A{k} F{k}" for k in range(6)]
    layers[first : first + 2] = [f"[A{first} A{first + 1}] [F{first} F{first + 1}]"]
    return " ".join(layers)


def held_out(verdicts: tuple[str, ...] = ("not told apart", "better"), winner: int = 2) -> Cell:
    """What a search's record says of held-out text: of trial 2, and of trials 1 and 0 beside it."""
    ends = {"not told apart": (-0.02, 0.01), "better": (-0.03, -0.01), "worse": (0.01, 0.02)}
    finalists = [
        {
            "trial": trial,
            "program": paired(first),
            "seen": quality_of(seen),
            "unseen": quality_of(seen + 0.02),
        }
        for trial, first, seen in ((2, 3, 0.03), (1, 2, 0.04), (0, 1, 0.05))
    ]
    others = [
        {
            "difference": sum(ends[verdict]) / 2,
            "low": ends[verdict][0],
            "high": ends[verdict][1],
            "verdict": verdict,
        }
        for verdict in verdicts
    ]
    last = f"HELD-OUT TEXT OVERTURNS THE SEARCH: trial {winner} is the winner, not trial 2"
    return {
        "by": "divergence",
        "confidence_of_all_intervals": 0.95,
        "original": quality_of(0.0),
        "searched": finalists[0],
        "runners_up": [other | finalist for other, finalist in zip(others, finalists[1:], strict=True)],
        "winner": winner,
        "overturned": winner != 2,
        "sentences": [
            "trial 2: numbers",
            *(
                f"trial 2 is {verdict}: trial {trial}"
                for trial, verdict in zip((1, 0), verdicts, strict=True)
            ),
            *([last] if winner != 2 else []),
        ],
    }


def make_checkpoint(folder: Path, **source: Any) -> Path:
    folder.mkdir()
    report = {
        "form": "fused",
        "reason": "two layers side by side",
        "program": "A0 F0 [A1 A2] [F1 F2]",
        "effective_depth": 2.0,
        "sync_points_on_two_ranks": 4,
        "recipe": None,
        "source": {"model": "tiny", "num_layers": 3, "model_hash": "a" * 64} | source,
        "proof": {
            "tokens": 128,
            "logit_scale": 3.0,
            "exact": 1e-7,
            "written": 2e-7,
            "tolerance": 1e-4,
            "dtype": "float32",
        },
        "versions": {},
    }
    (folder / "surgeon.json").write_text(json.dumps(report))
    return folder


def make_evaluation(folder: Path, accuracy: float = 0.25, **more: Any) -> Path:
    folder.mkdir()
    results = {
        "results": {
            "arc": {"alias": "arc", "sample_len": 40, "acc,none": accuracy, "acc_stderr,none": 0.01},
            "group": {"alias": "group", "sample_len": 80, "acc,none": 0.5, "acc_stderr,none": "N/A"},
            "member": {
                "alias": "member",
                "sample_len": 80,
                "acc,none": 0.123456,
                "acc_stderr,none": 0.01,
            },
        },
        "groups": {"group": {}},
        "group_subtasks": {"group": ["member"]},
        "n-shot": {"arc": 0},
        "higher_is_better": {"arc": {"acc": True}},
        "model_name": str(more.get("model", "tiny")),
        "pretty_env_info": "secret of the machine",
        "surgeon": record(**more),
    }
    (folder / "results_2026-01-01.json").write_text(json.dumps(results))
    return folder


def make_prediction(folder: Path, **more: Any) -> Path:
    """Two programs on two numbers of ranks with two batches; tracks cannot be on one, and one batch is too large."""
    folder.mkdir()
    rows = []
    for ranks, batch, program in itertools.product((1, 8), (1, 64), ("dense", "tracks:2")):
        none, faster = program == "tracks:2" and ranks == 1, 1 + 0.05 * ranks * (program == "tracks:2")
        numbers = {
            "first_token_ms": 40 * batch / ranks / faster,
            "per_token_ms": 9 / ranks / faster,
            "tokens_per_second": 100 * batch * ranks * faster,
            "communication_share": 0.25 / faster,
            "needed_bytes": (16 + batch) * 1e9 / ranks,
            "there_bytes": 64 * 1e9,
            **dict.fromkeys(
                ("first_token_speedup", "per_token_speedup", "tokens_per_second_speedup"), faster
            ),
        }
        row: Cell = {"program": program, "ranks": ranks, "batch": batch, "prompt": 1024, "new": 512}
        row |= {name: "nan" if none else number for name, number in numbers.items()}
        too_much = numbers["needed_bytes"] > numbers["there_bytes"]
        rows.append(
            row | {"fits": int(not none and not too_much), "refused": "no slices" if none else ""}
        )
    write_csv(folder / "predict.csv", rows)
    own = {"hardware": "h100-sxm", "heading": "on h100-sxm", "swept": True}
    (folder / "predict.json").write_text(json.dumps(record(**(own | more))))
    return folder


def state(perplexity: float, divergence: float | None) -> Cell:
    """What `Quality.to_json` gives, with intervals of a tenth up and down."""
    ends = None if divergence is None else [0.9 * divergence, 1.1 * divergence]
    return {
        "perplexity": perplexity,
        "perplexity_interval": [0.9 * perplexity, 1.1 * perplexity],
        "divergence": divergence,
        "divergence_interval": ends,
        "tokens": 4000,
    }


def make_healing(
    folder: Path, ends: tuple[float, float] = (0.4, 0.1), steps: int = 40, **more: Any
) -> Path:
    """Training that brings the divergence from the first to the second of `ends`; perplexity is 10 times e to it."""
    folder.mkdir()
    every, (first, last) = 4, ends
    held_out = []
    for step in range(0, steps + 1, every):
        divergence = last + (first - last) * (1 - step / steps) ** 3
        values = {"perplexity": BASE * math.exp(divergence), "divergence": divergence}
        row: Cell = {"step": step, "seconds": 3.0 * step}
        for name, value in values.items():
            row |= {name: value, f"{name}_low": 0.9 * value, f"{name}_high": 1.1 * value}
        held_out.append(row)
    write_csv(folder / "held_out.csv", held_out)
    training = [
        {"step": step, "tokens": 512 * step, "seconds": 3.0 * step, "loss": 2.5 - step / steps + 0.1 * (step % 3),
         "learning_rate": 1e-4 * (1 - step / steps)}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    write_csv(folder / "training.csv", training)
    own = {
        "original": state(BASE, None),
        "edited": state(BASE * math.exp(first), first),
        "healed": state(BASE * math.exp(last), last),
        "program": paired(3),
        "recipe": "surgeon: 1\nmodel: tiny\n",
        "settings": {
            "train": "edited",
            "learning_rate": 1e-4,
            "lora": None,
            "warmup_steps": 0,
            "distill": ["logits"],
        },
        "held_out": "demo",
        "held_out_hash": "e" * 64,
        "steps": steps,
        "tokens": 512 * steps,
        "seconds": 3.0 * steps,
    }
    (folder / "run.json").write_text(json.dumps(record(**(own | more))))
    return folder


def make_from_scratch(
    folder: Path, seed: int = 0, end: float = 3.0, program: str = "A0 F0", **more: Any
) -> Path:
    """Training that brings the loss from 7 down to `end`, nats per token."""
    losses = [end + (7 - end) * (1 - step / 40) ** 2 for step in range(0, 41, 4)]
    unknown = dict.fromkeys(("divergence", "divergence_low", "divergence_high"), "nan")
    rows = []
    for place, loss in enumerate(losses):
        ppl = math.exp(loss)
        ends = {"perplexity": ppl, "perplexity_low": 0.9 * ppl, "perplexity_high": 1.1 * ppl}
        rows.append({"step": 4 * place, "seconds": 3.0 * place} | ends | unknown)
    settings = {
        "steps": 40,
        "batch": 8,
        "seed": seed,
        "learning_rate": 2e-3,
        "arguments": {"weight_decay": 0.1},
    }
    own = {
        "identity": {
            "task": "train",
            "model": {"model_type": "llama"},
            "program": program,
            "settings": settings,
        },
        "architecture": "llama",
        "configuration": "surgeon: 1\nmodel: {model_type: llama}\n",
        "parameters": 1234567,
        "program": program,
        "settings": settings,
        "data": "demo:train",
        "held_out": "demo",
        "held_out_hash": "e" * 64,
        "steps": 40,
        "tokens": 40960,
        "seconds": 60.0,
        "untrained": state(math.exp(losses[0]), None),
        "trained": state(math.exp(losses[-1]), None),
    }
    folder.mkdir()
    write_csv(folder / "held_out.csv", rows)
    write_csv(folder / "training.csv", training_rows(40, losses))
    (folder / "run.json").write_text(json.dumps(record(**(own | more))))
    return folder


def training_rows(steps: int, losses: list[float]) -> list[Cell]:
    return [
        {
            "step": step,
            "tokens": 1024 * step,
            "seconds": 1.5 * step,
            "loss": losses[step // 4] + 0.1,
            "learning_rate": 1e-3,
        }
        for step in range(1, steps + 1)
    ]


def everything(folder: Path, **more: Any) -> list[Path]:
    """One run of every kind."""
    return [
        make_scan(folder / "scan", ALL, 6, **more),
        make_similarity(folder / "similarity", **more),
        make_sensitivity(folder / "sensitivity", **more),
        make_spectrum(folder / "spectrum", **more),
        make_search(folder / "search", **more),
        make_healing(folder / "fused.run", **more),
        make_checkpoint(folder / "fused"),
        make_evaluation(folder / "tasks", **more),
        make_prediction(folder / "predicted", **more),
    ]
