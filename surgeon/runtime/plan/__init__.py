"""The plan of a model, made before any rank starts: its checks, placement, memory."""
