"""The simulated serving system: engines behind a router, pools for prefill and decode, links between them, clients."""
