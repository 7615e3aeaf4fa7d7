"""What a rank computes: its slices of a model, forward passes, the cache, and choosing tokens."""
