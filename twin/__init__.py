"""The simulated backend, its theory, the `twin` command line, and a Python surface.

    import twin

    result = twin.simulate("examples/sun-shared.yaml")
    print(result.summary)
    print(result.requests.describe())

`load` reads a scenario file, `simulate` runs it, `sweep` runs many configurations of it, `plan` finds the deployment
that meets goals, `compare` puts two results side by side. Bad input raises `BadInput`,
which names the file, the field, the value and what was expected.

This package has the SimPy processes of serving systems and AFD bundles, closed forms that predict them, sweeps and the
commands. It never imports torch. Only the commands that need `live` import it, when they run. The names below are
imported when they are first read, so that `import twin` loads no third-party package.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twin.api.inputs import Scenario, load
    from twin.api.plan import PlanResult, compare, plan
    from twin.api.simulation import Result, simulate
    from twin.api.sweep import SweepResult, sweep
    from workloads.errors import BadInput

__version__ = "0.1.0"

__all__ = [
    "BadInput", "PlanResult", "Result", "Scenario", "SweepResult", "__version__", "compare", "load", "plan", "simulate",
    "sweep",
]  # fmt: skip

_MODULES = {
    "BadInput": "workloads.errors",
    "PlanResult": "twin.api.plan",
    "Result": "twin.api.simulation",
    "Scenario": "twin.api.inputs",
    "SweepResult": "twin.api.sweep",
    "compare": "twin.api.plan",
    "load": "twin.api.inputs",
    "plan": "twin.api.plan",
    "simulate": "twin.api.simulation",
    "sweep": "twin.api.sweep",
}


if not TYPE_CHECKING:  # a type checker sees the imports above, and reports other names

    def __getattr__(name: str) -> object:
        """Import a public name when it is first read."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = vars(import_module(_MODULES[name]))[name]
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names, and the modules imported so far."""
    return sorted({*globals(), *__all__})
