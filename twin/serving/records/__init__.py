"""Records of a run: requests, steps of engines, queues, sessions, and requests that were shed."""
