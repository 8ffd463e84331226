"""Runs independent tasks: in processes of this machine (`executor`), on a Dask or a Ray cluster (`clusters`).

An executor keeps nothing. The caller saves each result when it comes, and may go on with another executor.
"""
