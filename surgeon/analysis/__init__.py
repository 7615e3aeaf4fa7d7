"""Measurements over many programs at once."""
