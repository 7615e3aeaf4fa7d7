"""The modeling files that travel inside exported checkpoints, and need only torch and transformers there.

Modules of this package that they import (`models/replacements.py`) need torch alone, and are written into them.

The fused form's file builds an architecture of its own. The program form's makes the classes for any architecture of
`transformers`, as config.json describes it; for a Llama (`model_type` "llama", class `LlamaConfig`):

    model_type       "surgeon_llama": no stock class takes it, so that loading without trust_remote_code is refused
                     (as "llama" it would silently run the unedited layers)
    architectures    ["ProgramLlamaForCausalLM"]
    auto_map         AutoConfig, AutoModel and AutoModelForCausalLM: ProgramLlamaConfig, ProgramLlamaModel and
                     ProgramLlamaForCausalLM of modeling_surgeon_program.py
    surgeon_program  the program's text, over the stored layers
    logit_scale      the factor of logits, if any: vLLM's name for it
    surgeon_family   where a layer has its sublayers, and how the decoder calls it (`FamilyEntry`)
    the rest         the original's, `num_hidden_layers` and lists with one entry per layer following the stored layers

Inside a wrapper (`model_type` "mistral3") it is "surgeon_mistral3", and the classes are ProgramMistral3Config and
ProgramMistral3ForImageTextToText, for AutoModelForImageTextToText.

`ProgramLlamaConfig` is `LlamaConfig` but for its `model_type`. To read it without running the file: take "surgeon_" off
the `model_type`, leave out `auto_map` and entries that begin with "surgeon_", and read the rest as the stock
configuration, as `surgeon.checkpoint.config.open_stored` does.
"""
