"""The plugin's settings and limits, and a program's pipeline stages; nothing here needs vLLM."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from surgeon.errors import did_you_mean
from surgeon.language.program import Node

FORMATS = ("auto", "hf", "safetensors")  # of vLLM's --load-format
REDUCE = ("auto", "torch")
LOW_RANK = ("replicate", "gather")


@dataclass(frozen=True)
class PluginSettings:
    """The settings in `--additional-config '{"surgeon": {...}}'`.

    Attributes:
        reduce: one of REDUCE (reduce.py).
        low_rank: as `Plan.low_rank`: each rank has the first factors of what reads the stream, or computes some of them
            and gathers the rest.
    """

    reduce: str = "auto"
    low_rank: str = "replicate"


def read_settings(additional_config: Any) -> PluginSettings:
    """Read the plugin's part of vLLM's additional configuration."""
    found = (additional_config or {}).get("surgeon", {})
    known = [field.name for field in fields(PluginSettings)]
    for name in found:
        if name not in known:
            raise ValueError(f"there is no setting {name!r} in --additional-config; {did_you_mean(name, known)}")
    settings = PluginSettings(**found)
    for name, value, values in (("reduce", settings.reduce, REDUCE), ("low_rank", settings.low_rank, LOW_RANK)):
        if value not in values:
            raise ValueError(f"there is no {name} {value!r} in --additional-config; {did_you_mean(value, values)}")
    return settings


def reason_against(vllm_config: Any) -> str | None:
    """Say why the plugin cannot run what vLLM is asked for; None if it can."""
    parallel = vllm_config.parallel_config
    load_format = str(vllm_config.load_config.load_format)
    if vllm_config.quant_config is not None:
        return "it has no quantised weights; leave out --quantization, or export the model with a dtype"
    if load_format not in FORMATS:
        return f"it reads safetensors itself, not by --load-format {load_format}; use auto or safetensors"
    if parallel.decode_context_parallel_size > 1:
        return "it does not divide a text's cache among ranks; leave out --decode-context-parallel-size"
    return None


def stage_nodes(nodes: tuple[Node, ...], stage: int, stages: int) -> tuple[Node, ...]:
    """The nodes of one pipeline stage: as many for each as can be."""
    if len(nodes) < stages:
        raise ValueError(f"a program of {len(nodes)} nodes cannot be cut into {stages} pipeline stages; use fewer")
    return nodes[len(nodes) * stage // stages : len(nodes) * (stage + 1) // stages]
