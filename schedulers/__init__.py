"""Pure scheduling state machines, driven alike by the simulator and by the live engine.

Allowed here: queues, slots, policies and their integrity checks, in plain Python on slotted objects and integers.
Not allowed: a clock, I/O, randomness, SimPy, torch, numpy or any other third-party package. Time and random draws are
passed in as arguments. Of the other packages only the `Request` type of `workloads` may be imported.
"""
