"""Topologies, which make systems of pools, routers and links: a module for each, and the registry of names."""
