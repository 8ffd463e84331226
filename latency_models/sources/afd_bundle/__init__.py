"""Decode steps of an AFD bundle: x attention and y FFN instances that serve as one decode engine."""
