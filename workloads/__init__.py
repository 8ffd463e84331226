"""What arrives: requests, length distributions, arrival processes, mixes, shared prefixes and trace readers.

May live here: the `Request` a client submits, families of lengths and of arrivals (each a small class that is
handed a generator), mixes of models and of tasks, the `Workload` that makes requests of all these, readers of
traces, and what every room may need: the exception tree's root (`workloads.errors`) and the bounded reader of JSON
files (`workloads.json_files`). May not: anything that knows how long a step takes
or who runs next. Imports nothing internal.

All public names can be imported from here. Only `Request` and the errors are loaded at once: the rest needs
numpy and is fetched when first asked for, so that a scheduler which imports `workloads.request` stays free of
it.
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
            if name in __all__ and hasattr(found := import_module(f"{__name__}.{module}"), name):
                return getattr(found, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
