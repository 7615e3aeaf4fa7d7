"""Settings, limits and configurations of program checkpoints on vLLM; nothing here needs vLLM.

They are importable by name, because vLLM sends them to its other processes. vLLM asks of a model that the heads in its
configuration divide by the ranks. Of native tracks the configuration has those of one track, and ranks have whole
tracks: they share the heads of all tracks that run side by side.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from transformers import CONFIG_MAPPING

from surgeon.checkpoint.forms import PROGRAM
from surgeon.language.program import Node, Program, Step
from surgeon.language.sublayer import ATTENTION
from surgeon.models.edit import PROGRAM_KEY, PROGRAM_PREFIX
from surgeon.models.families import FAMILIES, Family
from surgeon.models.families.specs import Unit
from surgeon.words import did_you_mean

CONFIGS: dict[str, Any] = {
    name: type(
        f"{PROGRAM.shipped.stem(name)}Config",
        (CONFIG_MAPPING[name],),
        {"model_type": PROGRAM.shipped.prefix + name, "__module__": __name__},
    )
    for name in FAMILIES
}
globals().update({config.__name__: config for config in CONFIGS.values()})


def attentions_at_once(program: Program) -> int:
    """The most attentions that run side by side in branches, slices of one counting as one."""
    return max(1, int(_most(program.nodes)))


def _most(nodes: tuple[Node, ...]) -> Fraction:
    found = [Fraction()]
    for node in nodes:
        if isinstance(node, Step):
            # An attention's part, by its largest slice; ranks take those of one step apart, as those of a layer.
            slices = [
                sublayer.piece[1] if sublayer.piece else 1
                for sublayer in node.sublayers
                if sublayer.kind == ATTENTION
            ]
            found += [Fraction(1, min(slices))] if slices else []
        else:
            found.append(sum(map(_most, node.branches), Fraction()))
    return max(found)


def with_all_heads(convertor: Any) -> Any:
    """Make a class that tells vLLM a model's shape, for program checkpoints, of its `ModelArchConfigConvertorBase`."""

    class ProgramShape(convertor):  # type: ignore[misc]
        @property
        def _family(self) -> Family:
            return FAMILIES[self.hf_text_config.model_type.removeprefix(PROGRAM_PREFIX)]

        def _units(self, unit: Unit) -> int:
            program = Program.parse(getattr(self.hf_text_config, PROGRAM_KEY))
            if self._family.attention.latent is not None:
                unit = "heads"  # latent attentions cache keys of every head
            return self._family.units(self.hf_text_config)[unit] * attentions_at_once(program)

        def get_total_num_attention_heads(self) -> int:
            return self._units("heads")

        def get_total_num_kv_heads(self) -> int:
            return self._units("kv_heads")

        def get_head_size(self) -> int:
            latent = self._family.latent(self.hf_text_config)
            if latent is not None:
                return latent.width
            return self._family.head_dim(self.hf_text_config)

    return ProgramShape


FORMATS = ("auto", "hf", "safetensors")  # of vLLM's --load-format
# Settings in `--additional-config '{"surgeon": {...}}'`, the usual value first. `reduce` is explained in reduce.py;
# `low_rank` is as `Plan.low_rank`: each rank has the first factors of what reads the stream, or computes some of them
# and gathers the rest.
SETTINGS = {"reduce": ("auto", "torch"), "low_rank": ("replicate", "gather")}


def read_settings(additional_config: Any) -> dict[str, str]:
    """Read the plugin's part of vLLM's additional configuration; every setting of `SETTINGS` has a value."""
    found = (additional_config or {}).get("surgeon", {})
    for name in found:
        if name not in SETTINGS:
            raise ValueError(
                f"there is no setting {name!r} in --additional-config; {did_you_mean(name, SETTINGS)}"
            )
    settings: dict[str, str] = {name: values[0] for name, values in SETTINGS.items()} | found
    for name, values in SETTINGS.items():
        if settings[name] not in values:
            raise ValueError(
                f"there is no {name} {settings[name]!r} in --additional-config; {did_you_mean(settings[name], values)}"
            )
    return settings


def reason_against(vllm_config: Any) -> str | None:
    """Say why the plugin cannot run what vLLM is asked for; None if it can."""
    parallel = vllm_config.parallel_config
    load_format = str(vllm_config.load_config.load_format)
    if vllm_config.quant_config is not None:
        return "it has no quantised weights; leave out --quantization, or export the model with a dtype"
    if load_format not in FORMATS:
        return (
            f"it reads safetensors itself, not by --load-format {load_format}; use auto or safetensors"
        )
    if parallel.decode_context_parallel_size > 1:
        return "it does not divide a text's cache among ranks; leave out --decode-context-parallel-size"
    return None


def stage_nodes(nodes: tuple[Node, ...], stage: int, stages: int) -> tuple[Node, ...]:
    """The nodes of one pipeline stage: as many for each as can be."""
    if len(nodes) < stages:
        raise ValueError(
            f"a program of {len(nodes)} nodes cannot be cut into {stages} pipeline stages; use fewer"
        )
    return nodes[len(nodes) * stage // stages : len(nodes) * (stage + 1) // stages]
