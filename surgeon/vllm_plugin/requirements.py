"""What the plugin cannot do, and how a program is cut into pipeline stages; nothing here needs vLLM."""

from __future__ import annotations

from typing import Any

from surgeon.program import Node

FORMATS = ("auto", "hf", "safetensors")  # of vLLM's --load-format


def reason_against(vllm_config: Any) -> str | None:
    """Why the plugin cannot run what vLLM is asked for; None if it can."""
    parallel, load_format = vllm_config.parallel_config, str(vllm_config.load_config.load_format)
    if vllm_config.quant_config is not None:
        return "it has no quantised weights; leave out --quantization"
    if load_format not in FORMATS:
        return f"it reads safetensors itself, not by --load-format {load_format}; use auto or safetensors"
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
