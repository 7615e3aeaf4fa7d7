"""What a model can spare: measurements over many programs at once."""
