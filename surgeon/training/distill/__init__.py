"""Distillation: training towards an original, its predictions and its streams."""
