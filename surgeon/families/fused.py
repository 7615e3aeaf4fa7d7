"""What `surgeon export` writes in the fused form: any family's functions, in layers that may differ in width.

Its configuration says what the family it came from has; see `checkpoint/remote_code/modeling_surgeon_fused.py`.
"""

from dataclasses import replace
from typing import Any

from surgeon.families.base import Family, Projection
from surgeon.families.gpt2 import GPT2
from surgeon.families.gpt_neo import GPT_NEO
from surgeon.families.gpt_neox import GPT_NEOX
from surgeon.families.llama import LLAMA
from surgeon.families.mistral import MISTRAL
from surgeon.families.opt import OPT
from surgeon.families.phi3 import PHI3
from surgeon.families.qwen2 import QWEN2
from surgeon.families.qwen3 import QWEN3

_NAMES = {
    family.model_type: family.name for family in (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, OPT, GPT2, GPT_NEO, GPT_NEOX)
}
POSITIONS = "model.embed_positions"  # where positions are learned


def _variant(family: Family, config: Any) -> Family:
    head_norms = ("self_attn.q_norm", "self_attn.k_norm") if config.head_norm else ()
    return replace(
        family,
        name=_NAMES.get(config.base_model_type, family.name),
        norm_kind="layer" if config.norm == "layer" else "rms",
        attention=replace(family.attention, head_norms=head_norms),
        mlp=family.mlp if config.gated else replace(family.mlp, projections=family.mlp.projections[1:]),
        gated=config.gated,
        rotary=not config.learned_positions,
        position_embedding=POSITIONS if config.learned_positions else None,
        position_offset=config.position_offset,
        steps_per_layer=1 if config.parallel_residual else 2,
    )


FUSED = replace(
    LLAMA,
    name="the fused form",
    model_type="surgeon_fused",
    norm_epsilon="norm_eps",
    partly_rotary=True,
    dropout="residual_dropout",
    window="sliding_window",
    window_layers="layer_types",
    variant=_variant,
)

# Where every role of a sublayer lies in a layer, whichever family it came from.
PROJECTIONS: dict[str, Projection] = {
    projection.role: projection for spec in (LLAMA.attention, LLAMA.mlp) for projection in spec.projections
}
