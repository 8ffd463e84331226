"""A regression on logged engine steps of vLLM."""
