"""Requests and their arrival: length distributions, arrival processes, mixes, shared prefixes and trace readers.

This package has the `Request` that a client submits, families of lengths and of arrivals (small classes that draw from
a given generator), mixes of models and of tasks, the `Workload` that makes requests of all these, and readers of
traces. It also has two modules that every package may need: the root of the exception tree (`workloads.errors`) and
the bounded reader of JSON files (`workloads.json_files`). It knows neither step times nor schedulers, and imports no
other package.

All public names can be imported from here. Only `Request` and the errors are loaded at once. The rest needs numpy and
is loaded on first use, so that a scheduler that imports `workloads.request` stays free of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from workloads.errors import BadInput, TwinError
from workloads.request import TASKS, Request

if TYPE_CHECKING:
    from workloads.arrivals import Arrivals, ClosedLoop, Deterministic, Gamma, Poisson, Replay
    from workloads.generator import Workload
    from workloads.lengths import Empirical, Fixed, Geometric, Lengths, LogNormal, Uniform
    from workloads.mixes import ModelMix, TaskMix, TaskShare
    from workloads.pairs import Independent, JointEmpirical, LengthPairs
    from workloads.prefixes import SharedPrefixes
    from workloads.traces import Trace, TraceFormat, read_trace

__all__ = [
    "TASKS",
    "Arrivals",
    "BadInput",
    "ClosedLoop",
    "Deterministic",
    "Empirical",
    "Fixed",
    "Gamma",
    "Geometric",
    "Independent",
    "JointEmpirical",
    "LengthPairs",
    "Lengths",
    "LogNormal",
    "ModelMix",
    "Poisson",
    "Replay",
    "Request",
    "SharedPrefixes",
    "TaskMix",
    "TaskShare",
    "Trace",
    "TraceFormat",
    "TwinError",
    "Uniform",
    "Workload",
    "read_trace",
]

if not TYPE_CHECKING:  # so that a type checker still knows a misspelt name when it sees one

    def __getattr__(name: str) -> object:
        for module in ("lengths", "pairs", "arrivals", "traces", "mixes", "prefixes", "generator"):
            if name in __all__ and hasattr(source := import_module(f"{__name__}.{module}"), name):
                return getattr(source, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
