"""Training edited models: healing what an edit lost, on transformers' Trainer and accelerate."""
