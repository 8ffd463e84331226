"""The record store: the files that a run leaves on disk. Imports no other package."""
