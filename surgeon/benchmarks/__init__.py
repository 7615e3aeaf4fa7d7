"""Measuring the runtime: programs against each other, where the time of passes goes, and what it should be."""
