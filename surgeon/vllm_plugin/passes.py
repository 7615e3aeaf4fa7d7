"""Passes of program checkpoints in vLLM: not compiled, and recorded whole where each text gets one token.

Compilation would cut a pass at its attentions and record what lies between. A program's pass never waits for the host,
and is recorded as a whole, late reductions on their stream included; prompts run as they are.
"""

from __future__ import annotations

from typing import Any

from vllm.config import CompilationMode, CUDAGraphMode
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from surgeon.vllm_plugin.configs import read_settings


class ProgramPasses(VerifyAndUpdateConfig):  # type: ignore[misc]
    """vLLM's questions, by architecture, before it fills in its own defaults."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Fill in what vLLM's user has left open; `--enforce-eager` and `-O0` record nothing."""
        compilation = vllm_config.compilation_config
        settings = read_settings(vllm_config.additional_config)
        if compilation.mode not in (None, CompilationMode.NONE):
            raise ValueError(
                "surgeon's plugin cannot run this: its passes are not compiled; leave out -cc.mode"
            )
        compilation.mode = CompilationMode.NONE
        if settings["reduce"] == "torch":  # vLLM's recordings hold nothing of torch.distributed's
            compilation.cudagraph_mode = CUDAGraphMode.NONE
        elif compilation.cudagraph_mode is None and vllm_config.optimization_level > 0:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
