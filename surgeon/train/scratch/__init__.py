"""Models from scratch: what they are built of, and how they are written."""
