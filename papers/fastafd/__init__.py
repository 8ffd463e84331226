"""FastAFD on GB200: measured decode steps of real rA-1F bundles and of wide-EP vLLM, beside predicted ones."""
