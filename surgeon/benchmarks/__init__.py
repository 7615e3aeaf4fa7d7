"""Measurements of the runtime: programs against each other, and where the time of passes goes."""
