"""An OpenAI-compatible HTTP server in front of one engine, or of a topology of several workers.

The way of a request, one file each:

1. `connection.py` reads the request line and headers, with time limits. 2. `app.py` lists the endpoints; it checks key,
size and load, parses the body (`protocol.py`), and sends the response. 3. The endpoint (`completions.py`, `pooling.py`,
`endpoints.py`) makes the response: `service.py` makes prompts of texts, chats or token ids, and of each of them a
`RequestState` with its `SamplingParams` (`request_state.py`). 4. `service.py` runs these on a backend, such as
`engine_backend.py` (one engine, stepped by the event loop), and wakes the response at new tokens.

`metrics.py` counts, `openapi.py` describes the endpoints. `command.py` with its `options.py`, `loading.py`,
`topology.py` and `launcher.py` start and stop the server.
"""
