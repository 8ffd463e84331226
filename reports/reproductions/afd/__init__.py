"""The AFD ratio paper: published and computed values, as tables."""
