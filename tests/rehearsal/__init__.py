"""Code for a GPU, run on one that is not there.

    python -m tests.rehearsal [NAME ...]

gpu        the pretended device: its tensors have types, shapes and devices, and no numbers
launches   the kernels that were launched on it, and whether Triton can make code of each launch
pieces     what is rehearsed

It finds tensors on the wrong device, waits within a graph, launches that a GPU would refuse, and arguments that a
kernel does not compile for. It says nothing of numbers: those are the interpreter's and the CPU's to check.
"""
