"""The real plant: models, executors and servers driven by the same `schedulers` as the twin.

Nothing lives here yet. Never imports `twin`.
"""
