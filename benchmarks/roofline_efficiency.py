"""Efficiencies of kernels against data sheets: makes the file that source `roofline` reads, and reports its errors.

    python -m benchmarks.roofline_efficiency --data ../shared/data [--tables DATA] [--out FILE]
    python -m benchmarks.roofline_efficiency --tables DATA --backend trtllm [--kinds PATTERN] [--out FILE]
    python -m benchmarks.roofline_efficiency --tables DATA --all-to-all [--out FILE]

Tables are those in the data folder, and with `--tables` those that aiconfigurator-core installs (its `systems/data`).
The file in the package was made with the tables of aiconfigurator-core 0.12.0. The engine's own time is fitted to the
measured rows marked calib; the errors printed last are those of the rows marked dev and of later ones, which enter
nothing. With `--kinds PATTERN` (and `--tables`) only kinds that match are fitted, and everything else is kept as it is
in the package; with `--further DEVICE`, fits of one more device are added to the kinds there are. With `--backend`,
kinds that match are fitted to the tables of one engine alone, and others are those of vLLM. With `--all-to-all` those
of the exchange between experts are fitted, which are the same for every engine.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args

import numpy as np

from benchmarks.all_to_all_timings import all_to_alls
from benchmarks.engine_time import NO_TIME, fit_engine_time, formats_of, placement_of, predict
from benchmarks.kernel_fits import fit_kind
from benchmarks.kernel_timings import Timings, elementwise_timings, table_timings
from benchmarks.silicon import SiliconRow, read_silicon_rows
from benchmarks.state_timings import decode_indexers, linear_attention, prompt_indexers
from latency_models.deployment.hardware import Hardware, load_hardware
from latency_models.deployment.models import load_model
from latency_models.io.config_io import write_yaml
from latency_models.io.files import read_columns
from latency_models.sources.aiconfigurator.layout import TableFiles, flat_tables, packaged_tables, systems
from latency_models.sources.roofline.efficiency import Backend, Efficiency, Kind, built_in_efficiency
from latency_models.sources.roofline.spec import RooflineStepTime, family
from workloads.errors import BadInput

DEVICES = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200-sxm",
    "gb200": "gb200",
    "b300_sxm": "b300-sxm",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
"""Hardware files by the systems of the tables."""

LATER_DEVICES = ("b300-sxm", "gb300")
"""Devices whose fits were added with `--further`, as were those of latent attention on B200 and GB200: they are in no
mean."""

PROFILE = "measured/vllm_0.19_rtxpro6000_llama31_8b/kernels_tp1"
SILICON = "measured/aiconfigurator_silicon_calib_dev.csv.gz"
LATER = "measured/aiconfigurator_silicon_more.csv.gz"


def folders(data: Path, tables: Path | None) -> Iterator[tuple[TableFiles, Hardware]]:
    """The sets of tables, with the device of each. Of a package, those of vLLM."""
    for folder in sorted((data / "kernel_tables/aiconfigurator").glob("*_*")):
        system = next((system for system in DEVICES if folder.name.startswith(f"{system}_")), None)
        if system and folder.is_dir():
            yield flat_tables(folder), load_hardware(DEVICES[system])
    if tables:
        yield from installed(tables, "vllm")


def installed(tables: Path, backend: str, devices: Sequence[str] = ()) -> Iterator[tuple[TableFiles, Hardware]]:
    """The sets of tables of a backend, with the device of each; without `devices`, of all but LATER_DEVICES."""
    for system, versions in systems(tables).items():
        device = DEVICES.get(system)
        wanted = device in devices if devices else device not in (None, *LATER_DEVICES)
        if wanted and device is not None and backend in versions:
            yield packaged_tables(tables, system, backend), load_hardware(device)


def all_timings(data: Path, tables: Path | None) -> dict[str, list[Timings]]:
    """All timings by kind."""
    by_kind: dict[str, list[Timings]] = defaultdict(list)
    for files, hardware in folders(data, tables):
        for timings in table_timings(files, hardware):
            by_kind[timings.kind].append(timings)
    small = elementwise_timings(data / PROFILE, load_model("llama-3.1-8b"), load_hardware("rtx-pro-6000"))
    by_kind[small.kind].append(small)
    return dict(sorted(by_kind.items()))


def state_timings(tables: Path, devices: Sequence[str] = ()) -> dict[str, list[Timings]]:
    """Timings of linear attention and of indexers by kind, from the tables of the backend that has most of them."""
    by_kind: dict[str, list[Timings]] = defaultdict(list)
    for files, hardware in installed(tables, "vllm", devices):
        for table in ("gdn", "kda"):
            for timings in linear_attention(read_columns(path), hardware) if (path := files.path(table)) else ():
                by_kind[timings.kind].append(timings)
        sparse, latent = files.path("dsa_generation_module"), files.path("mla_generation_module")
        if sparse and latent:
            by_kind["decode_index"].append(decode_indexers(read_columns(sparse), read_columns(latent), hardware))
    for files, hardware in installed(tables, "sglang", devices):
        scores, choice = files.path("glm5_mqa_logits_module"), files.path("glm5_topk_module")
        if scores and choice:
            by_kind["prompt_index"].append(prompt_indexers(read_columns(scores), read_columns(choice), hardware))
    return dict(sorted(by_kind.items()))


def extended(tables: Path, kinds: str, devices: Sequence[str]) -> Efficiency:
    """The fits of the package with those of the kinds that match, or with those of further devices."""
    efficiency = built_in_efficiency()
    timings = state_timings(tables, devices)
    for backend in ("vllm", "trtllm") if devices else ():
        for files, hardware in installed(tables, backend, devices):
            for part in table_timings(files, hardware):
                of_backend = part.kind.endswith("_latent") == (backend == "trtllm")  # vLLM's tables have none of it
                if of_backend:
                    timings.setdefault(part.kind, []).append(part)
    kernels, sources = dict(efficiency.kernels), set(efficiency.sources)
    for kind, parts in timings.items():
        if not fnmatch(kind, kinds):
            continue
        fit = fit_kind(parts)
        if devices:
            known = kernels[kind]  # type: ignore[index]
            fit = known.model_copy(update={"devices": known.devices | fit.devices})
        kernels[kind] = fit  # type: ignore[index]
        sources |= {f"{part.device}: {part.source}" for part in parts}
    return efficiency.model_copy(update={"kernels": dict(sorted(kernels.items())), "sources": sorted(sources)})


def with_all_to_alls(tables: Path, efficiency: Efficiency) -> Efficiency:
    """Fits with those of the exchange between experts, in the file of whichever engine."""
    timings = all_to_alls(tables, DEVICES)
    kernels = dict(efficiency.kernels) | {kind: fit_kind(parts) for kind, parts in timings.items()}
    sources = {f"{part.device}: {part.source}" for parts in timings.values() for part in parts}
    return efficiency.model_copy(
        update={"kernels": dict(sorted(kernels.items())), "sources": sorted(sources | set(efficiency.sources))}
    )


def of_backend(tables: Path, backend: Backend, kinds: str) -> Efficiency:
    """The fits of vLLM's kernels, with those of one engine's tables in their place where there are any."""
    by_kind: dict[Kind, list[Timings]] = defaultdict(list)
    for files, hardware in installed(tables, backend, tuple(DEVICES.values())):
        recurrent = files.path("gdn")
        states = linear_attention(read_columns(recurrent), hardware) if recurrent else []
        for timings in (*table_timings(files, hardware), *states):
            if fnmatch(timings.kind, kinds):
                by_kind[timings.kind].append(timings)
    base = built_in_efficiency()
    kernels = dict(base.kernels)
    for kind, timings in by_kind.items():
        fit, others = fit_kind(timings), base.kernels[kind].devices if kind in base.kernels else {}
        kernels[kind] = fit.model_copy(update={"devices": others | fit.devices})
    sources = {f"{part.device}: {part.source}" for timings in by_kind.values() for part in timings}
    return base.model_copy(
        update={
            "backend": backend,
            "kernels": dict(sorted(kernels.items())),
            "sources": sorted(sources | set(base.sources)),
        }
    )


def print_fits(efficiency: Efficiency, kinds: str = "*", devices: Sequence[str] = ()) -> None:
    """A line for each kind and device."""
    for kind, fit in efficiency.kernels.items():
        for name, reached in (("any", fit.any), *fit.devices.items()):
            if not fnmatch(kind, kinds) or (devices and name not in devices):
                continue
            share = "     -" if reached.compute is None else f"{reached.compute:6.2f}"
            print(
                f"{kind:22} {name:14} launch {reached.launch * 1e6:6.1f} us  compute {share}"
                f"  memory {reached.memory:5.2f}  error {reached.error:6.1%}"
                f"  spread {reached.spread:5.2f}  {reached.kernels} kernels"
            )


def print_errors(name: str, rows: Sequence[SiliconRow], tpot: Sequence[float]) -> None:
    """A line for each engine, device, model and precision, and one for all rows."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row, seconds in zip(rows, tpot, strict=True):
        for group in (f"{row.backend} {row.system} {row.model} {row.precision}", "~ all"):
            groups[group].append(seconds / row.tpot)
    for group, errors in sorted(groups.items()):
        error = np.abs(np.array(errors) - 1)
        print(
            f"{name:5} TPOT {group.removeprefix('~ '):38} {len(errors):3} rows  median of predicted/measured "
            f"{np.median(errors):.3f}  median error {np.median(error):.1%}  P90 {np.quantile(error, 0.9):.1%}"
        )


def print_coverage(
    name: str, rows: Sequence[SiliconRow], device: Mapping[str, Hardware], fits: Mapping[str, Efficiency]
) -> None:
    """Share of rows within their 90 % intervals, and the width of these, by chip, format and family of models."""
    groups: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    for row in rows:
        hardware, model, efficiency = device[row.system], load_model(row.model), fits[row.backend]
        tpot = predict(row, hardware, efficiency).tpot
        unknowns = RooflineStepTime(model, hardware, placement_of(row), efficiency).unknowns()
        effects = [np.log(predict(row, hardware, efficiency, {one.name: 1.0}).tpot / tpot) for one in unknowns]
        reach = 1.645 * float(np.sqrt(np.sum(np.square(effects))))
        weights = formats_of(row, model).experts
        for group in (f"{hardware.name} {weights} {family(model)}", "~ all"):
            groups[group].append((abs(np.log(row.tpot / tpot)) <= reach, 2 * reach))
    for group, intervals in sorted(groups.items()):
        coverage, width = np.mean(intervals, axis=0)
        print(
            f"{name:5} TPOT {group.removeprefix('~ '):30} {len(intervals):3} rows"
            f"  in 90 % {coverage:.0%}  width {width:.2f}"
        )


def main() -> int:
    """Fit, print the errors, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--kinds", default="*", help="kinds to fit, such as *_gdn; with --tables, without --data")
    parser.add_argument("--further", nargs="+", default=[], metavar="DEVICE", help="devices to add")
    parser.add_argument("--backend", choices=get_args(Backend), help="with --tables alone")
    parser.add_argument("--all-to-all", action="store_true", help="with --tables, and --backend if it is not vLLM's")
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.data is None:
        if options.tables is None:
            parser.error("expected --data, or --tables alone with --kinds, --further or --backend")
        if options.all_to_all:
            efficiency = with_all_to_alls(options.tables, built_in_efficiency(options.backend or "vllm"))
            print_fits(efficiency, "all_to_all*")
            return write(efficiency, options.out)
        if options.backend:
            efficiency = of_backend(options.tables, options.backend, options.kinds)
            print_fits(efficiency, options.kinds)
            return write(efficiency, options.out)
        efficiency = extended(options.tables, options.kinds, options.further)
        print_fits(efficiency, options.kinds, options.further)
        return write(efficiency, options.out)
    try:
        by_kind = all_timings(options.data, options.tables)
        rows = read_silicon_rows(options.data / SILICON)
        later = read_silicon_rows(options.data / LATER, known_only=True)
    except BadInput as error:
        parser.error(str(error))
    if options.tables:
        by_kind |= state_timings(options.tables)
    sources = sorted({f"{one.device}: {one.source}" for timings in by_kind.values() for one in timings})
    fits = {kind: fit_kind(timings) for kind, timings in by_kind.items()}
    efficiency = Efficiency.model_validate(
        {"schema": "twin.kernel-efficiency/1", "sources": sources, "kernels": fits, "engine": NO_TIME}
    )
    calib, dev = ([row for row in rows if row.split == split] for split in ("calib", "dev"))
    device = {row.system: load_hardware(DEVICES[row.system]) for row in (*rows, *later)}
    engine = fit_engine_time(calib, [device[row.system] for row in calib], efficiency)
    efficiency = efficiency.model_copy(update={"engine": engine})
    print_fits(efficiency)
    print(engine)
    by_engine = {backend: built_in_efficiency(backend) for backend in get_args(Backend)} | {"vllm": efficiency}
    for name, measured in (("dev", dev), ("later", later)):
        print_errors(
            name, measured, [predict(row, device[row.system], by_engine[row.backend]).tpot for row in measured]
        )
        print_coverage(name, measured, device, by_engine)
    return write(efficiency, options.out)


def write(efficiency: Efficiency, path: Path | None) -> int:
    """Write the file, if there is a path for it."""
    if path is not None:
        path.write_text(write_yaml(efficiency.model_dump(mode="json", by_alias=True, exclude_defaults=True)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
