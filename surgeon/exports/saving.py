"""`surgeon.edit` and `surgeon.load`: models whose `save_pretrained` writes the program that they run, too."""

from __future__ import annotations

from surgeon.checkpoint.load import load
from surgeon.exports.in_memory import save_edited
from surgeon.models.edit import edit, save_edited_with

__all__ = ["edit", "load"]

save_edited_with(save_edited)
