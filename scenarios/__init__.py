"""The models of a scenario file: workload, engine, system, measurement and validation, checked before anything runs.

Both backends read them, so that one file describes one engine for the simulator and for the live server. They import
neither backend.
"""
