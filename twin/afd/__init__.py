"""AFD bundles: the simulation, its records, and the metrics of the records."""
