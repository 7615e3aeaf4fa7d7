"""GLM-4: GLM with norms after sublayers, too."""

from dataclasses import replace

from surgeon.models.families.glm import GLM

GLM4 = replace(
    GLM,
    name="GLM-4",
    model_type="glm4",
    attention=replace(
        GLM.attention,
        modules=("self_attn", "post_self_attn_layernorm"),
        post_norm="post_self_attn_layernorm",
    ),
    mlp=replace(GLM.mlp, modules=("mlp", "post_mlp_layernorm"), post_norm="post_mlp_layernorm"),
)
