"""One program for each peer of `benchmarks.peers`, to be run by the interpreter that has the peer installed."""
