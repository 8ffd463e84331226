"""The Python surface: `twin.load`, `twin.simulate`, `twin.sweep` and what they return.

May live here: what a program and the command line both do with a scenario, results as pandas DataFrames, run folders
and their figures. May not: printing, reading `sys.argv`, or anything that only a terminal needs.
"""
