"""What CPUs compute when texts are continued, in C++: products, attention over blocks, and what lies between them.

PyTorch's own operations are made for many tokens at once. One token of each of some texts is thousands of small pieces
of work, of which each costs more to begin than to do. These functions do the same arithmetic in fewer and larger
pieces. They are compiled at their first use (build.py); without a compiler PyTorch's operations do all of it.
"""
