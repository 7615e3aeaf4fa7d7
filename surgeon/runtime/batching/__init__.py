"""The tokens of requests that a forward pass computes, and the blocks of the cache that hold them. No tensors."""
