"""Costs of a program on described hardware."""
