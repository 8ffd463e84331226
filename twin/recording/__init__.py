"""Requests of a live server recorded through a proxy, and recorded requests sent to one: `twin observe`, `twin replay`.

Both write a run: `requests.jsonl` with the times of each request, and `meta.json`. `twin calibrate refine` reads it.
"""
