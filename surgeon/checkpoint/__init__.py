"""Reading, writing and exporting checkpoints."""
