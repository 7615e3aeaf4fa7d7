"""The program form of checkpoints on vLLM, which starts this plugin in each of its processes.

vLLM finds it by the entry point `vllm.general_plugins` of the installed package; nothing here needs vLLM before that.
The model itself is in model.py, which vLLM imports where it runs one.
"""

from __future__ import annotations

MODEL = "surgeon.vllm_plugin.model:ProgramForCausalLM"


def register() -> None:
    """Tell vLLM of program checkpoints' architectures, heads and passes, and `transformers` of their configurations.

    So config.json is read without running the file that lies in the checkpoint (no trust_remote_code). Called again, it
    changes nothing.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils import model_arch_config_convertor as shapes

    from surgeon.checkpoint.forms import PROGRAM
    from surgeon.vllm_plugin.configs import CONFIGS, with_all_heads
    from surgeon.vllm_plugin.passes import ProgramPasses

    shape = with_all_heads(shapes.ModelArchConfigConvertorBase)
    for name, config in CONFIGS.items():
        AutoConfig.register(config.model_type, config, exist_ok=True)
        ModelRegistry.register_model(PROGRAM.shipped.class_name(name), MODEL)
        MODELS_CONFIG_MAP[PROGRAM.shipped.class_name(name)] = ProgramPasses
        shapes.MODEL_ARCH_CONFIG_CONVERTORS[config.model_type] = shape
