"""What a program costs on hardware that is described rather than there."""
