"""The Python surface: `twin.load`, `twin.simulate`, `twin.sweep` and their results.

This package has the operations that programs and the command line share, results as pandas DataFrames, run folders and
their figures. It does not print, read `sys.argv`, or do anything that only a terminal needs.
"""
