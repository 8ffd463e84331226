"""What the numbers in the documents come from. Each module is one command: `python -m benchmarks.<name>`."""
