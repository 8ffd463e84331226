"""Runs the points of a sweep in parallel. Each is kept as soon as it is done, and a killed sweep can be resumed."""
