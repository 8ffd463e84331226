"""The manifest of a run folder: versions, commit, command, and the run's inputs."""

from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.records.checkout import commit
from twin import __version__

if TYPE_CHECKING:
    from twin.sweeps.ratio_sweep import RatioSweep
    from twin.sweeps.serving_sweep import ServingSweep

PACKAGES = ("numpy", "scipy", "simpy", "pydantic", "torch")
"""Packages whose versions may change a result. The manifest names those that are loaded."""


def manifest(inputs: dict[str, Any], call: str | None = None) -> dict[str, Any]:
    """The content of `manifest.json`, before the run sets its status.

    Args:
        inputs: keys of the command's own.
        call: the Python call that made the run; None: the command line of this process.
    """
    return {
        "command": call or shlex.join(["twin", *sys.argv[1:]]),
        "version": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": _platform(),
        "packages": {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules},
        **inputs,
    }


def _platform() -> str:
    """System, release, machine and C library; `platform.platform` starts a process to ask for the processor, too."""
    system = platform.uname()
    return "-".join((system.system, system.release, system.machine, *filter(None, platform.libc_ver())))


def serving_manifest(sweep: ServingSweep, scenario: Path, call: str | None = None) -> dict[str, Any]:
    """The manifest of runs of serving systems."""
    plans = [case.plan for case in sweep.cases]
    inputs = {
        "scenario_file": str(scenario),
        "scenarios": [plan.scenario.model_dump(mode="json", by_alias=True) for plan in plans],
        "replications": sweep.replications,
        "draws": sweep.draws,
        "seed": plans[0].scenario.seed,
        "step_time": [plan.scenario.step_time.provenance() for plan in plans],
        "trace": plans[0].trace_name,
    }
    return manifest(inputs, call)


def bundle_manifest(sweep: RatioSweep, inputs: dict[str, Any], call: str | None = None) -> dict[str, Any]:
    """The manifest of runs of AFD bundles."""
    first = sweep.cases[0].plan
    every = {
        **inputs,
        "scenarios": [case.plan.scenario.model_dump(mode="json", by_alias=True) for case in sweep.cases],
        "ratios": [str(topology.ratio) for topology in sweep.topologies],
        "seed": first.scenario.seed,
        "calibration": first.calibration.name,
        "calibration_hash": first.calibration.content_hash(),
        "trace": None if first.trace is None else first.trace.name,
    }
    return manifest(every, call)
