"""Who runs next: pure state machines that both plants drive, simulated and real.

May live here: slots, queues, policies and their integrity checks, in plain Python on slotted objects and integers.
May not: a clock, I/O, randomness, SimPy, torch, numpy, or any third-party package. Time comes in as an argument. Of the
other folders only the `Request` type of `workloads` may be imported.
"""
