"""How ranks exchange tensors and messages."""
