"""Attention/FFN bundles: x attention instances feed y FFN instances (AFD 3.1).

coordinator  ranks and messages; the global queue decides which request gets which slot, by `schedulers.bundle_slots`
workers      attention: requests, KV cache, attention, norms, gate, sampling; FFN: stateless, rows in and rows out
"""
