"""Closed forms to compare the simulation with.

`paper` is AFD section 4 exactly as published; `load` gives the token load of a bundle for any length distribution;
`cycle` predicts what the simulated bundle does, barrier and pipeline included; `gaps` names the differences.
"""
