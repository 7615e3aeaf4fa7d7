"""What the plugin is told and cannot do, and how a program is cut into pipeline stages; nothing here needs vLLM."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from surgeon.errors import did_you_mean
from surgeon.language.program import Node

FORMATS = ("auto", "hf", "safetensors")  # of vLLM's --load-format
REDUCE = ("auto", "shm", "torch", "vllm")


@dataclass(frozen=True)
class PluginSettings:
    """What `--additional-config '{"surgeon": {...}}'` says.

    Attributes:
        reduce: how ranks add up what they computed, one of REDUCE; reduce.py says what they are.
    """

    reduce: str = "auto"


def read_settings(additional_config: Any) -> PluginSettings:
    """The plugin's part of vLLM's additional configuration.

    Raises:
        ValueError: if there is no such setting, or no such value.
    """
    found = (additional_config or {}).get("surgeon", {})
    known = [field.name for field in fields(PluginSettings)]
    for name in found:
        if name not in known:
            raise ValueError(f"there is no setting {name!r} in --additional-config; {did_you_mean(name, known)}")
    settings = PluginSettings(**found)
    if settings.reduce not in REDUCE:
        raise ValueError(
            f"there is no reduce {settings.reduce!r} in --additional-config; {did_you_mean(settings.reduce, REDUCE)}"
        )
    return settings


def reason_against(vllm_config: Any) -> str | None:
    """Why the plugin cannot run what vLLM is asked for; None if it can."""
    parallel, load_format = vllm_config.parallel_config, str(vllm_config.load_config.load_format)
    if vllm_config.quant_config is not None:
        return "it has no quantised weights; leave out --quantization"
    if load_format not in FORMATS:
        return f"it reads safetensors itself, not by --load-format {load_format}; use auto or safetensors"
    if vllm_config.device_config.device_type != "cpu" and not vllm_config.model_config.enforce_eager:
        return "its passes cannot be recorded as CUDA graphs yet; add --enforce-eager"
    if parallel.decode_context_parallel_size > 1:
        return "it does not divide a text's cache among ranks; leave out --decode-context-parallel-size"
    return None


def stage_nodes(nodes: tuple[Node, ...], stage: int, stages: int) -> tuple[Node, ...]:
    """The nodes of one pipeline stage: as many for each as can be.

    Raises:
        ValueError: if there are fewer nodes than stages.
    """
    if len(nodes) < stages:
        raise ValueError(f"a program of {len(nodes)} nodes cannot be cut into {stages} pipeline stages; use fewer")
    return nodes[len(nodes) * stage // stages : len(nodes) * (stage + 1) // stages]
