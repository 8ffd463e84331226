"""Reports of a measured calibration: a table for a terminal, and a figure of each operation."""
