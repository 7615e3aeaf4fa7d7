"""The plain form: every layer of the program is one whole attention and one whole feed-forward."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from surgeon.checkpoint.forms.base import Form, Layout
from surgeon.checkpoint.forms.stored_layers import Inexpressible, per_layer_lists, require_uniform, stored_layers
from surgeon.checkpoint.read import Checkpoint
from surgeon.language.program import Program
from surgeon.models.families import Family


class Plain(Form):
    """An ordinary checkpoint."""

    name = "plain"
    on_vllm = "Unmodified vLLM, without surgeon:"

    def lay_out(self, program: Program, family: Family, config: Any) -> Layout:
        layers = stored_layers(program, family.steps_per_layer)
        for layer in layers:
            if not layer.has_stock_width:
                wide = " ".join(map(str, layer.sublayers))
                raise Inexpressible(f"{wide} would be a layer of another width than the others")
        require_uniform(layers, family, per_layer_lists(family, config, config.to_dict()))
        reason = f"the program is a sequence of {len(layers)} whole layers, which any software loads"
        return Layout(self, reason, layers)

    def stock_config(self, checkpoint: Checkpoint, family: Family) -> Any:  # noqa: ARG002
        return AutoConfig.from_pretrained(checkpoint.folder)


PLAIN = Plain()
