"""Running programs on several ranks. A client uses `service.py`; each folder imports only from those before it here.

`batching` (what a pass computes), `plan` (what each rank computes), `comm` (how ranks exchange tensors), `model` (a
rank's arithmetic and cache), `processes` (where ranks run).
"""
