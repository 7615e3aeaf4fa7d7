"""The processes of ranks: starting them or gathering those of torchrun, what runs in them, noticing that they fail."""
