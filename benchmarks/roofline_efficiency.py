"""Efficiencies of kernels against data sheets: makes the file that source `roofline` reads, and reports its errors.

    python -m benchmarks.roofline_efficiency --data ../shared/data [--tables DATA] [--out FILE]

Tables are those in the data folder, and with `--tables` those that aiconfigurator-core installs (its `systems/data`).
The file in the package was made with the tables of aiconfigurator-core 0.12.0. The engine's own time is fitted to the
measured rows marked calib; the errors printed last are those of the rows marked dev, which enter nothing.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from latency_models.deployment.hardware import Hardware, load_hardware
from latency_models.deployment.models import load_model
from latency_models.io.config_io import write_yaml
from latency_models.sources.aiconfigurator.layout import TableFiles, flat_tables, packaged_tables, systems
from latency_models.sources.aiconfigurator.silicon import read_silicon_rows
from latency_models.sources.roofline.efficiency import Efficiency
from latency_models.sources.roofline.engine_time import NO_TIME, fit_engine_time, predict
from latency_models.sources.roofline.fitting import fit_kind
from latency_models.sources.roofline.timings import Timings, elementwise_timings, table_timings
from workloads.errors import BadInput

DEVICES = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200-sxm",
    "gb200": "gb200",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
"""Hardware files by the systems of the tables."""

PROFILE = "measured/vllm_0.19_rtxpro6000_llama31_8b/kernels_tp1"
SILICON = "measured/aiconfigurator_silicon_calib_dev.csv.gz"


def folders(data: Path, tables: Path | None) -> Iterator[tuple[TableFiles, Hardware]]:
    """The sets of tables, with the device of each. Of a package, those of vLLM."""
    for folder in sorted((data / "kernel_tables/aiconfigurator").glob("*_*")):
        system = next((system for system in DEVICES if folder.name.startswith(f"{system}_")), None)
        if system and folder.is_dir():
            yield flat_tables(folder), load_hardware(DEVICES[system])
    if tables:
        for system in systems(tables):
            if system in DEVICES:
                yield packaged_tables(tables, system, "vllm"), load_hardware(DEVICES[system])


def all_timings(data: Path, tables: Path | None) -> dict[str, list[Timings]]:
    """All timings by kind."""
    by_kind: dict[str, list[Timings]] = defaultdict(list)
    for files, hardware in folders(data, tables):
        for timings in table_timings(files, hardware):
            by_kind[timings.kind].append(timings)
    small = elementwise_timings(data / PROFILE, load_model("llama-3.1-8b"), load_hardware("rtx-pro-6000"))
    by_kind[small.kind].append(small)
    return dict(sorted(by_kind.items()))


def main() -> int:
    """Fit, print the errors, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    try:
        by_kind = all_timings(asked.data, asked.tables)
        rows = read_silicon_rows(asked.data / SILICON)
    except BadInput as error:
        parser.error(str(error))
    sources = sorted({f"{one.device}: {one.source}" for known in by_kind.values() for one in known})
    fits = {kind: fit_kind(known) for kind, known in by_kind.items()}
    made = Efficiency.model_validate(
        {"schema": "twin.kernel-efficiency/1", "sources": sources, "kernels": fits, "engine": NO_TIME}
    )
    calib, dev = ([row for row in rows if row.split == split] for split in ("calib", "dev"))
    device = {row.system: load_hardware(DEVICES[row.system]) for row in rows}
    engine = fit_engine_time(calib, [device[row.system] for row in calib], made)
    made = made.model_copy(update={"engine": engine})
    for kind, fit in fits.items():
        for name, reached in (("any", fit.any), *fit.devices.items()):
            share = "     -" if reached.compute is None else f"{reached.compute:6.2f}"
            print(
                f"{kind:22} {name:14} launch {reached.launch * 1e6:6.1f} us  compute {share}"
                f"  memory {reached.memory:5.2f}  error {reached.error:6.1%}"
                f"  spread {reached.spread:5.2f}  {reached.kernels} kernels"
            )
    print(engine)
    ratio = np.array([predict(row, device[row.system], made).tpot / row.tpot for row in dev])
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, each in zip(dev, ratio, strict=True):
        groups[row.backend, row.model].append(each)
    for group, found in sorted(groups.items()):
        print(f"dev TPOT {group}: {len(found)} rows, median of predicted/measured {np.median(found):.2f}")
    error = np.abs(ratio - 1)
    print(f"dev TPOT: {len(dev)} rows, median error {np.median(error):.1%}, P90 {np.quantile(error, 0.9):.1%}")
    if asked.out:
        asked.out.write_text(write_yaml(made.model_dump(mode="json", by_alias=True, exclude_defaults=True)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
