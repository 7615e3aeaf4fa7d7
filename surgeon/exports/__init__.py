"""Checkpoints of changed models: staged, written, read back, proven, then named."""
