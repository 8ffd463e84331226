"""Finds the deployment that meets goals under a workload: a space of candidates, estimates, a race and a search."""
