"""Runs independent tasks: in processes of this machine, on a Dask cluster, or on a Ray cluster.

An executor keeps nothing. The caller saves each result when it comes, and may go on with another executor.

    executor    the protocol, and processes of this machine
    shipping    tasks as bytes, with traces and tables sent once to each worker, which must have our version, in batches
    clusters    Dask and Ray
"""
