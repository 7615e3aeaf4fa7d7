"""Kernels for GPUs, in Triton, which PyTorch's builds for GPUs bring along."""
