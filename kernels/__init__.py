"""What runs: one folder an operation, a torch reference beside its Triton kernel.

Nothing lives here yet. This file stays empty of names: dispatch lives in each operation's folder. Imports nothing
internal.
"""
