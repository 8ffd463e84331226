"""Serving systems of several workers: attention/FFN bundles, and prefill and decode apart.

A worker is a *role*: a generator that yields what it waits for (`transport.Receive`), and sends messages at once. Its
code is the same whether all roles run in one process or each in its own.

transport     messages, their forms, and what a role may wait for
local         all roles in one process, one at a time
gloo          each role in a process of its own, over torch.distributed
rendezvous    how processes find each other, and which one has failed
requests      requests and their tokens as tensors
bundle/       rA-1F and xA-yF bundles (AFD 3.1)
"""
