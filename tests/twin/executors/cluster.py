"""A LocalCluster of Dask in a process of its own: `python cluster.py` prints its address, and ends with its stdin."""

from __future__ import annotations

import logging
import sys

from distributed import LocalCluster

WORKERS = 2

if __name__ == "__main__":
    quiet = {"dashboard_address": ":0", "silence_logs": logging.CRITICAL}
    with LocalCluster(n_workers=WORKERS, threads_per_worker=1, memory_limit=0, **quiet) as cluster:
        print(cluster.scheduler_address.removeprefix("tcp://"), flush=True)
        sys.stdin.read()
