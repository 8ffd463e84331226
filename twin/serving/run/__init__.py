"""One run of a plan: in one simulation, or of independent engines one after the other."""
