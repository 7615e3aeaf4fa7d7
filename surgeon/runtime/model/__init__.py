"""A rank's slices of a model, forward passes, the cache, and choosing tokens."""
