"""The record store: what a run leaves on disk. A leaf: imports nothing internal."""
