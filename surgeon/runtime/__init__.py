"""Running programs on several ranks. A client uses `service.py`; each folder imports only from those before it here.

`kernels` (C++ for CPUs, and recordings), `batching` (what a pass computes), `plan` (what each rank computes), `comm`
(how ranks exchange tensors), `model` (a rank's arithmetic and cache), `worker` (where ranks run).
"""
