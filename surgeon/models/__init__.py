"""What an architecture is, its tensors by role, and programs inside `transformers` models."""
