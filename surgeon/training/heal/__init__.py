"""Healing: an edited model is trained back; what is healed, and how it is written."""
