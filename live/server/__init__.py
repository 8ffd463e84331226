"""An OpenAI-compatible HTTP server in front of one engine, or of a topology of several workers.

The way of a request, one file each:

1. `connection.py` reads the request line and headers, with time limits; `asgi.py` reads the body and sends the
response. 2. `app.py` checks key, size and load, parses the body (`protocol.py`), and calls the endpoint (`routes.py`
lists them). 3. The endpoint (`completions.py`, `chat.py`, `pooling.py`, `tokenization.py`, `status.py`) answers, with
these helpers:
   a. `input_processor.py` makes a prompt of texts, chats or token ids, and checks its length;
   b. `generation_factory.py` makes a generation of the prompt and the request's sampling parameters;
   c. `async_engine.py` runs the generation on a backend, such as `engine_backend.py` (one engine, stepped by the event
      loop), and notifies the endpoint of new tokens;
   d. `completion_output.py` reads text and log-probabilities off the generation, whole or in deltas (`replies.py`).

`generation_response.py` has the part of the responses that completions and chats share. `service.py` holds the helpers
together. `command.py` with its `options.py`, `loading.py`, `topology.py` and `launcher.py` start and stop the server.
"""
