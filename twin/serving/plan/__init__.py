"""Plans: everything that a run needs, checked and built from a scenario."""
