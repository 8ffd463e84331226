"""The error of step times for a model, a GPU and an engine, from every measured serving row of aiconfigurator-core.

`rows` reads them, `prediction` predicts each from data sheets, `correction` learns from others how far off that is,
`cells` sums up, and `python -m benchmarks.error_board` runs it all.
"""
