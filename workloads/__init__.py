"""What arrives: requests, length distributions, arrival processes and trace readers.

May live here: the `Request` a client submits, families of lengths and of arrivals (each a small class that is handed a
generator), readers of traces, and the exception tree's root (`workloads.errors`).
May not: anything that knows how long a step takes or who runs next. Imports nothing internal.
"""
