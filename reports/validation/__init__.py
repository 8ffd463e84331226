"""A live run and its prediction, side by side."""
