"""A model's unknowns learned from a short run of a real engine, for `twin calibrate refine`."""
