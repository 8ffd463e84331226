"""Attention/FFN bundles: x attention instances feed y FFN instances (AFD 3.1).

layout            sizes of a bundle, its ranks, and the forms of its messages
coordinator       the global queue: decides which request gets which slot, by `schedulers.bundle_slots`
attention_worker  owns requests, KV cache, attention, norms, the gate and sampling
ffn_worker        stateless: rows in, rows out
deployment        what each process is started from; all workers in this process
"""
