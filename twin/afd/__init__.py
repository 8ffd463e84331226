"""AFD bundles: the simulated plant, what it records, and what is measured from the records."""
