"""Architectures, their tensors by role, and programs inside `transformers` models."""
