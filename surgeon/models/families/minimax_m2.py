"""MiniMax-M2: Mixtral's files, norms of all queries and all keys as OLMoE's, and a router as DeepSeek-V3's."""

from dataclasses import replace
from functools import partial

from surgeon.models.families.base import Positions
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.mistral import MIXTRAL
from surgeon.models.families.olmo import OLMOE
from surgeon.models.families.specs import route_by_config

assert MIXTRAL.mixture is not None
MINIMAX_M2 = replace(
    LLAMA,
    name="MiniMax-M2",
    model_type="minimax_m2",
    summary=(
        "Mixtral's files, norms of all queries and all keys as OLMoE's, and a router as DeepSeek-V3's."
    ),
    attention=OLMOE.attention,
    mlp=replace(
        MIXTRAL.mlp,
        mixture=replace(
            MIXTRAL.mixture,
            routing=partial(route_by_config, scores="sigmoid", normalise=True),
            correction="mlp.e_score_correction_bias",
        ),
    ),
    stored_names=MIXTRAL.stored_names,
    positions=Positions(partial=True),
)
