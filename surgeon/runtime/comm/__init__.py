"""Exchanges of tensors and messages between ranks."""
