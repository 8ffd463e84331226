"""Programs that produce the figures in the documents. Each module is one command: `python -m benchmarks.<name>`."""
