"""What is shown of a calibration that was measured: a table for a terminal, and a figure of each operation."""
