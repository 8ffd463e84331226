"""The Prelude paper: published and computed values, as tables and figures."""
