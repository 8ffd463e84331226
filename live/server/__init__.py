"""An OpenAI-compatible HTTP server in front of one engine.

A request passes through `app.py` (limits, keys, errors), a module of endpoints (`completions.py`, `chat.py`,
`pooling.py`, `tokens.py`, `status.py`; `routes.py` lists them), and `worker.py`, which steps the engine.
"""
