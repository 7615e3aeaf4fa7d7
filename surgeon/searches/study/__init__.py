"""The study of a search in its storage, and the workers that share it."""
