"""Searching for the best program under a budget."""
