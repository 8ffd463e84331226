"""Step times of another source, with its unknowns learned from a short run: `twin calibrate refine` writes the file."""
