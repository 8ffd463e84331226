"""`twin.sweep`: many configurations of a serving system, or ratios of an AFD bundle."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.run_directory import write_columns
from scenarios.reading import Settings, combinations
from twin.api.inputs import (
    Overrides,
    Scenario,
    Variations,
    check_counts,
    choose_executor,
    errors_name_arguments,
    opened,
    path_of,
    refuse_for_kind,
    values_of,
)
from twin.api.run_folder import complete, figure, new_run
from twin.executors.executor import Executor
from twin.sweeps import ratio_sweep, serving_sweep
from twin.sweeps.ratio_sweep import RatioSweep
from twin.sweeps.serving_sweep import ServingSweep
from workloads.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Document = dict[str, Any]

INSTEAD = {"afd-bundle": ": give ratio and vary", "serving": ": give vary"}


@dataclass(frozen=True)
class SweepResult:
    """Results of a sweep: `document` as `twin sweep --json` prints it, `finished` points by key as in `points.jsonl`.

    docs/reference/python.md has columns and units of its DataFrames.
    """

    scenario: Scenario
    document: Document
    finished: dict[str, Document]
    _sweep: ServingSweep | RatioSweep
    _requests: dict[str, pd.DataFrame] | None = None

    @cached_property
    def points(self) -> pd.DataFrame:
        """One row for each configuration, and for each ratio of an AFD bundle: settings, then results."""
        from twin.api.frames import bundle_points, serving_points

        frame = serving_points if isinstance(self._sweep, ServingSweep) else bundle_points
        return frame(self.document)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row for each finished request of every point of an AFD bundle; `BadInput` if they were not kept."""
        import pandas as pd

        if self._requests is None:
            raise BadInput("expected twin.sweep(…, requests=True), for an AFD bundle", field="requests", value=False)
        tables = [table.assign(point=name) for name, table in self._requests.items()]
        columns = ["point", *(name for name in tables[0] if name != "point")]
        return pd.concat(tables, ignore_index=True)[columns]

    def plot(self, kind: str | None = None) -> Figure:
        """A figure: `sweep` or, of an AFD bundle, `throughput`, `idle` or `regimes`; None: the first; or `BadInput`."""
        first = "sweep" if isinstance(self._sweep, ServingSweep) else "throughput"
        return figure(self.document, kind or first)

    def save(self, folder: str | Path, *, figures: bool = True) -> Path:
        """Write a run folder like that of `twin sweep`; returns its path. `BadInput` if it is not empty, else
        `OSError`.
        """
        inputs = self._sweep.inputs()
        with new_run(folder, self.scenario.path, inputs, "twin.sweep(…).save(…)") as run:
            for key, point in self.finished.items():
                run.add_point(key, point)
            for name, table in (self._requests or {}).items():
                columns = {column: table[column].to_numpy() for column in table}
                write_columns(run.path / "requests" / f"{name}.parquet", columns)
            complete(run, self.document, figures=figures)
        return run.path

    def _repr_html_(self) -> str:
        html: str = self.points.to_html(na_rep="–")
        return html


def sweep(
    scenario: str | Path | Scenario,
    vary: Variations | None = None,
    *,
    ratio: str | float | Iterable[str | float] | None = None,
    overrides: Overrides | None = None,
    replications: int = 1,
    draws: int | None = None,
    trace: str | Path | None = None,
    jobs: int | None = None,
    executor: str = "local",
    requests: bool = False,
) -> SweepResult:
    """Simulate every combination of the values in `vary`, of an AFD bundle at every ratio. Prints and writes nothing.

    Args:
        scenario: a file of kind `serving` or `afd-bundle`, or the result of `load`.
        vary: several values of fields, as a mapping of dotted keys to lists
            (`{"engine.max_num_seqs": [64, 128]}`) or as texts (`["engine.max_num_seqs=64,128"]`).
        ratio: A/F ratios of an AFD bundle: a number, a text as after `--ratio` (`1,2,4`, `1:32`, `7/2`), or several of
            these. None: the scenario's.
        overrides: changed fields of every configuration.
        replications, draws: as for `simulate`; of serving systems only.
        trace: file whose lengths take the place of the scenario's.
        jobs: processes, by default one for each core.
        executor: where points are simulated: `local`, `dask`, `dask://host:port` or `ray`.
        requests: keep every request of an AFD bundle, for `SweepResult.requests`.

    Raises:
        BadInput: naming the file, the field or argument, the value and what was expected.
    """
    with errors_name_arguments():
        check_counts(replications, draws)
        choice = choose_executor(executor, jobs)
        source = opened(scenario, overrides, "serving", "afd-bundle")
        settings: list[Settings] = [source.settings | changes for changes in combinations(values_of(vary))]
        file = None if trace is None else path_of("trace", trace)
        sweep = prepare_sweep(
            source.document, source.path, settings, file, _ratios(ratio), replications, draws, requests=requests,
            instead=INSTEAD,
        )  # fmt: skip
        with choice.start() as started:
            return _simulate(sweep, source, started)


def prepare_sweep(
    document: Document, path: Path, configurations: Sequence[Settings], trace: Path | None, ratio: str | None,
    replications: int, draws: int | None, *, requests: bool, instead: Mapping[str, str],
    advance: Callable[[str], object] = lambda text: None,
) -> ServingSweep | RatioSweep:  # fmt: skip
    """Check all configurations of a scenario; errors name the flags. `advance` is called as each is ready.

    `instead`: how a scenario of each kind is swept, for errors that refuse a flag of the other kind.
    """
    refuse_for_kind({"--ratio": ratio is not None, "--requests": requests}, "afd-bundle", document, path, instead)
    of_serving = {"--replications": replications > 1, "--draws": bool(draws)}
    refuse_for_kind(of_serving, "serving", document, path, instead)
    if document["kind"] == "serving":
        return serving_sweep.prepare(document, path, configurations, trace, replications, draws, advance)
    return ratio_sweep.prepare(document, path, ratio, configurations, trace, advance, keep_requests=requests)


def _ratios(ratio: str | float | Iterable[str | float] | None) -> str | None:
    if ratio is None or isinstance(ratio, str):
        return ratio
    return ",".join(map(str, ratio)) if isinstance(ratio, Iterable) else str(ratio)


def _simulate(sweep: ServingSweep | RatioSweep, source: Scenario, executor: Executor) -> SweepResult:
    points: dict[str, Document] = {}
    with tempfile.TemporaryDirectory() as folder:  # worker processes hand over their requests as files
        for _ in sweep.run(points, lambda key, point: None, executor, folder=Path(folder)):
            pass
        requests = None
        if isinstance(sweep, RatioSweep) and sweep.keep_requests:
            import pandas as pd

            files = sorted(Path(folder).glob("requests/*.parquet"), key=lambda file: file.name)
            requests = {file.stem: pd.read_parquet(file) for file in files}
    return SweepResult(source, sweep.summarise(points), points, sweep, requests)
