"""Text to programs: the language, the executor, recipes, and the operations that make programs."""
