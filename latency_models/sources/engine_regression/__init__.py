"""A regression on timed steps of the live engine."""
