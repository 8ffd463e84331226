"""Serving systems of several workers: bundles (AFD 3.1), replicas, prefill and decode apart, shared decode (SUN 3.2).

A worker is a *role*: a generator that yields what it waits for (`transport.Receive`), and sends messages at once. Its
code is the same whether all roles run in one process (`local`) or each in its own (`sockets`).
`processes` has what those of bundles and pools are started from.
"""
