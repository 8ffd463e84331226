"""Validation: a live run measured and compared with its prediction. This package does not import the live engine.

`run` goes from the first profiling round to the document, for engines and pools; `bundle` does for a bundle.
"""
