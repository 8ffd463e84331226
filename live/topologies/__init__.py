"""Serving systems of several workers: attention/FFN bundles, and prefill and decode apart.

A worker is a *role*: a generator that yields what it waits for (`transport.Receive`), and sends messages at once. Its
code is the same whether all roles run in one process or each in its own.

transport     messages, their forms and bytes, and what a role may wait for
local         all roles in one process, one at a time
sockets       each role in a process of its own, over TCP connections
membership    how processes find each other, and which one has failed
requests      requests and their tokens as tensors
deployment    what a topology consists of
bundle/       rA-1F and xA-yF bundles (AFD 3.1)
pools/        engines: replicas, prefill and decode apart, shared decode pools (SUN 3.2)
processes     a worker's process, and workers started on this machine
front         rank 0 as a server's backend
"""
