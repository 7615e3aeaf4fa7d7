"""GLM: Llama's functions with gate and up packed into one projection; neighbouring features turn, half of a head's."""

from dataclasses import replace

from surgeon.models.families.llama import LLAMA
from surgeon.models.families.phi3 import PHI3

GLM = replace(LLAMA, name="GLM", model_type="glm", mlp=PHI3.mlp, partly_rotary=True, rotary_neighbours=True)
