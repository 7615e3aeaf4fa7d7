"""Training models on text, on transformers' Trainer and accelerate: healing what an edit lost, and from scratch."""
