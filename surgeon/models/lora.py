"""The parts of peft that are used here; it comes with the extra `train`, and nothing else imports it."""

from surgeon.errors import needs_extra

with needs_extra("train", "training"):
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from peft.tuners.lora import LoraLayer

__all__ = ["LoraConfig", "LoraLayer", "PeftModel", "get_peft_model", "get_peft_model_state_dict"]
