"""Programmatic dependent launch: the programs of a launch start while those of the launch before still run.

A step of few tokens is some 300 kernels of microseconds, each of which waits for the last program of the one before and
for its own launch. On Hopper and later a launch may instead begin as soon as all programs of the one before have
started; its programs then do what needs none of its results, and wait (`griddepcontrol`, PTX ISA 9.7.13.13).

Every kernel that takes DEPENDENT calls `wait_for_inputs` before it reads or writes anything that another one writes or
reads. So a kernel that has waited knows that all before it are done, and the order of memory is that of the stream.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ENABLED = False
"""True where kernels are launched so."""


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Let the next launch begin, and wait for the results of the one before."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


def dependent(x: torch.Tensor) -> dict[str, bool]:
    """The launch's options, and the kernel's constant DEPENDENT, for kernels on x's device."""
    possible = ENABLED and x.is_cuda and _has_dependent_launch(x.device)
    return {"DEPENDENT": possible, "launch_pdl": possible}


@functools.cache
def _has_dependent_launch(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9
