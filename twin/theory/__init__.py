"""Closed forms to compare the simulation with.

`paper` is AFD section 4 exactly as published, and names the gaps to a simulation; `cycle` predicts what the simulated
bundle does, barrier and pipeline included, from its token load for any length distribution.
"""
