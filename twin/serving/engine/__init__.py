"""A simulated engine: steps, windows of steps that are passed over, drafts and lower cache tiers."""
