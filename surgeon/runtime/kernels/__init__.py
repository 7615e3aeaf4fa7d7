"""Kernels in C++ for CPUs that continue texts: products, attention over blocks, and what lies between them.

One token of each of some texts is thousands of small pieces of work, which cost PyTorch's operations more to begin than
to do. The kernels are compiled at their first use (build.py); without a compiler PyTorch's operations do all of it.
"""
