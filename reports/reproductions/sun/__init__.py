"""The SUN paper: published and computed values, as tables and figures."""
