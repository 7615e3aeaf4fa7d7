"""Kernels in C++ for CPUs that continue texts: products, attention over blocks, and what lies between them.

One token of each of some texts is thousands of small pieces of work, of which each costs PyTorch's operations more to
begin than to do; these do the same arithmetic in fewer and larger pieces. They are compiled at their first use
(build.py); without a compiler PyTorch's operations do all of it.
"""
