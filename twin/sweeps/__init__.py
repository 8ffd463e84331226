"""Many points at once: in parallel, each kept as soon as it is done, taken up again after a kill."""
