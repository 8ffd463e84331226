"""FastAFD on GB200: measured and predicted decode steps, as tables and figures."""
