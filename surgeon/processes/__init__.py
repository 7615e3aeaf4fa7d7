"""Processes that work together: rendezvous, torchrun, sockets, watchdogs, journals."""
