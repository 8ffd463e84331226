"""The real plant: models, executors and engines driven by the same `schedulers` as the twin. Never imports `twin`.

There is no server yet, and no GPU has run any of it.
"""
