"""Ordering, measuring and memory of programs, shared by all passes over a model."""
