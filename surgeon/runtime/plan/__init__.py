"""What ranks are to compute, before any of them starts: the plan of a model, its checks, placement, memory."""
