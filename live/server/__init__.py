"""An OpenAI-compatible HTTP server in front of one engine, or of a topology of several workers.

The way of a request, one file each:

1. `connection.py` reads the request line and headers, with time limits. 2. `app.py` checks key, size and load, parses
the body (`protocol.py`), and sends the response (`replies.py`). 3. The endpoint (`completions.py`, `endpoints.py`)
makes the response: `input_processor.py` makes prompts of texts, chats or token ids, and `service.py` of each of them a
`RequestState` (`request_state.py`) with its generation. 4. `service.py` runs these on a backend, such as
`live.backend.EngineBackend` (one engine, stepped by the event loop), and wakes the response at new tokens.

`metrics.py` counts. `__main__.py` with its `options.py`, `loading.py` and
`launcher.py` start and stop the server.
"""
