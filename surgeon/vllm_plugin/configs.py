"""The configurations of program checkpoints, by the `model_type` that their architecture had; nothing needs vLLM.

They are importable by name, because vLLM sends them to its other processes. vLLM asks of a model that the heads in its
configuration divide by the ranks. Of native tracks the configuration has those of one track, and ranks have whole
tracks: they share the heads of all tracks that run side by side.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from transformers import CONFIG_MAPPING

from surgeon.checkpoint.remote_code import PROGRAM
from surgeon.language.program import Node, Program, Step
from surgeon.language.sublayer import ATTENTION
from surgeon.models.edit import PROGRAM_KEY, PROGRAM_PREFIX
from surgeon.models.families import FAMILIES, Family
from surgeon.models.families.specs import Latent, Unit

CONFIGS: dict[str, Any] = {
    name: type(
        f"{PROGRAM.stem(name)}Config",
        (CONFIG_MAPPING[name],),
        {"model_type": PROGRAM.prefix + name, "__module__": __name__},
    )
    for name in FAMILIES
}
globals().update({config.__name__: config for config in CONFIGS.values()})


def attentions_at_once(program: Program) -> int:
    """The most attentions that run side by side in branches, slices of one counting as one."""
    return max(1, int(_most(program.nodes)))


def _most(nodes: tuple[Node, ...]) -> Fraction:
    found = (_share(node) if isinstance(node, Step) else sum(map(_most, node.branches), Fraction()) for node in nodes)
    return max(found, default=Fraction())


def _share(step: Step) -> Fraction:
    """An attention's part, by its largest slice; ranks take those of one step apart, as they do those of a layer."""
    slices = [sublayer.piece[1] if sublayer.piece else 1 for sublayer in step.sublayers if sublayer.kind == ATTENTION]
    if slices:
        return Fraction(1, min(slices))
    return Fraction()


def with_all_heads(convertor: Any) -> Any:
    """Make a class that tells vLLM a model's shape, for program checkpoints, of its `ModelArchConfigConvertorBase`."""

    class ProgramShape(convertor):  # type: ignore[misc]
        @property
        def _family(self) -> Family:
            return FAMILIES[self.hf_text_config.model_type.removeprefix(PROGRAM_PREFIX)]

        @property
        def _latent(self) -> Latent | None:
            return self._family.latent(self.hf_text_config)

        def _units(self, unit: Unit) -> int:
            program = Program.parse(getattr(self.hf_text_config, PROGRAM_KEY))
            kept = "heads" if self._latent else unit  # latent attentions cache keys of every head
            return self._family.units(self.hf_text_config)[kept] * attentions_at_once(program)

        def get_total_num_attention_heads(self) -> int:
            return self._units("heads")

        def get_total_num_kv_heads(self) -> int:
            return self._units("kv_heads")

        def get_head_size(self) -> int:
            if self._latent:
                return self._latent.width
            return self._family.head_dim(self.hf_text_config)

    return ProgramShape
