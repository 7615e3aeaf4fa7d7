"""The processes of a runtime: ranks, and what runs in each."""
