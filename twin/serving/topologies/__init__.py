"""How pools, routers and links make a system: one module for each topology, and the registry of their names."""
