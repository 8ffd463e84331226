"""Base class and checks of estimators, in scikit-learn's manner.

The constructor stores its arguments under their own names, without checks. `fit` checks them, sets attributes that end
in an underscore, and returns the estimator. Methods that predict raise `NotFitted` before `fit`.
`tests/latency_models/fitting/test_conformance.py` checks every estimator for this.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workloads.errors import BadInput, TwinError

Floats: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = Sequence[float] | NDArray[np.float64] | NDArray[np.int64]


class CannotFit(BadInput):
    """Raised for measurements, or settings of an estimator, that do not allow a fit."""


class NotFitted(TwinError, AttributeError):
    """Raised when an estimator predicts before `fit`."""


class Estimator:
    """Access to parameters by name. A subclass's constructor names each parameter (no *args) and only stores it."""

    def get_params(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {name: getattr(self, name) for name in self._param_names()}

    def __repr__(self) -> str:
        params = ", ".join(f"{name}={value!r}" for name, value in self.get_params().items())
        return f"{type(self).__name__}({params})"

    @classmethod
    def _param_names(cls) -> list[str]:
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def _require_fit(self) -> None:
        if not any(name.endswith("_") and not name.startswith("_") for name in vars(self)):
            raise NotFitted(f"expected {type(self).__name__} to be fitted before it predicts")


def measurements(sizes: Numbers, times: Numbers) -> tuple[Floats, Floats]:
    """Checked copies of sizes (at least 0) and times (above 0), as float64 arrays of shape (n,)."""
    x, t = _flat(sizes, "sizes"), _flat(times, "times")
    if len(x) != len(t):
        raise CannotFit(f"expected as many times as sizes ({len(x)})", field="times", value=len(t))
    for name, column, fits in (("sizes", x, x >= 0), ("times", t, t > 0)):
        wrong = np.flatnonzero(~(np.isfinite(column) & fits))
        if len(wrong):
            at = int(wrong[0])
            bound = "0 or more" if name == "sizes" else "above 0"
            raise CannotFit(f"expected a finite number, {bound}", field=f"{name}[{at}]", value=float(column[at]))
    return x, t


def _flat(values: Numbers, name: str) -> Floats:
    try:
        column = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise CannotFit("expected a flat list of numbers", field=name, value=values) from None
    if column.ndim != 1:
        raise CannotFit("expected a flat list of numbers", field=name, value=f"an array of shape {column.shape}")
    return column
