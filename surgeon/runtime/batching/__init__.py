"""Which tokens of which requests a forward pass computes, and which blocks of the cache hold them. No tensors."""
