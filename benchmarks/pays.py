"""Do features pay as `twin ablate` says? Pairs of measured rows that differ in one feature, beside its verdicts.

    python -m benchmarks.pays --package FOLDER [--pairs 60] [--jobs N] [--write]

FOLDER is an installed `aiconfigurator_core`. A pair is two measurements of one model, GPU, engine, version and request
lengths, with as many requests in flight for each device, that differ in tensor parallelism (twice), attention (replicas
rather than ranks), experts (whole rather than sliced) or the format of weights. Of each, the change of output
throughput for each device is measured, and predicted as `twin ablate` does: the mean change over seeds, and its 95 %
interval over seeds and over draws of what is not known of step times, the same for both.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from benchmarks.error_board.loop import simulated
from benchmarks.error_board.prediction import OVERHEAD, chip, engine_of
from benchmarks.error_board.rows import Row, read_rows
from benchmarks.provenance import provenance
from twin.serving.plan.plan import Draw, scores_of
from twin.sweeps.ablation import prepare_ablation, relative_changes, verdict, with_layout_error
from twin.sweeps.serving_sweep import run_if_feasible

RESULT = Path(__file__).resolve().parent / "results" / "pays.json"

METRIC = "output_throughput"

NOISE = 0.05
"""Change of throughput below which a pair has no sign. Of 209 configurations that were measured twice, half agree
within 0.4 %, three quarters within 6 %; those further than `REPEATED` apart have settings that rows do not state."""

REPEATED = 0.1

SEEDS = 3
DRAWS = 10

MEASURED_DRAFTS = {"1 drafts": 0.17, "7 drafts": -0.09}
"""Middle of the published changes of throughput: +10 to +24 % at any number of clients, -6 to -12 % from 2 on."""

ACCEPTED = [0.6, 0.31, 0.16, 0.06, 0.025, 0.01, 0.004]
"""Shares of drafts accepted up to a position. Red Hat published mean lengths of 1.91, 2.07 and 2.13 tokens with 2, 3
and 4 drafts of gpt-oss-120b on ShareGPT (April 2026); how the first two positions share it, and those from the fifth
on, are assumed."""

EAGLE_HEAD: dict[str, Any] = {
    "schema": "twin.model/1", "name": "eagle-head", "hidden_size": 2880, "layers": 1, "vocabulary": 201088,
    "tied_embeddings": False, "attention": {"kind": "gqa", "heads": 64, "kv_heads": 8, "head_dim": 64},
    "ffn": {"kind": "dense", "intermediate_size": 2880}, "source": "assumed",
}  # fmt: skip
"""One layer of the model's width and an output head, together the 1.2 GB of published heads."""

FORMATS = ("bf16", "fp8", "fp4")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two measurements, `on` with the feature."""

    feature: str
    off: Row
    on: Row

    @property
    def measured(self) -> float:
        """The relative change of throughput for each device."""
        return throughput(self.on, self.on.ttft, self.on.tpot) / throughput(self.off, self.off.ttft, self.off.tpot) - 1


def throughput(row: Row, ttft: float, tpot: float) -> float:
    """Output tokens a second for each device, by Little's law."""
    return row.in_flight * row.osl / (ttft + (row.osl - 1) * tpot) / row.decode.devices


def _tensor_parallel(off: Row, on: Row) -> bool:
    before, after = off.decode, on.decode
    alike = replace(before, tensor_parallel=after.tensor_parallel) == after and off.precision == on.precision
    return alike and after.tensor_parallel == 2 * before.tensor_parallel and on.in_flight == 2 * off.in_flight


def _data_parallel(off: Row, on: Row) -> bool:
    before, after = off.decode, on.decode
    same = off.in_flight == on.in_flight and off.precision == on.precision and before.devices == after.devices
    return same and before.data_parallel == 1 < after.data_parallel and after.tensor_parallel == 1


def _expert_parallel(off: Row, on: Row) -> bool:
    same = off.in_flight == on.in_flight and off.precision == on.precision
    return same and not off.decode.expert_parallel and replace(off.decode, expert_parallel=True) == on.decode


def _format(off: Row, on: Row) -> bool:
    if not {off.precision, on.precision} <= set(FORMATS) or off.decode != on.decode or off.in_flight != on.in_flight:
        return False
    return FORMATS.index(off.precision) < FORMATS.index(on.precision)


FEATURES: Mapping[str, Callable[[Row, Row], bool]] = {
    "tensor parallelism doubled": _tensor_parallel,
    "attention data-parallel": _data_parallel,
    "experts whole (EP)": _expert_parallel,
    "weights in fewer bits": _format,
}
"""Features by name: true of two rows if the second has it, the first has not, and the rest is the same."""


def measurements(rows: Iterable[Row]) -> Iterator[Row]:
    """One row for each configuration of one engine, without those whose measurements differ by more than REPEATED."""
    configurations: dict[Row, list[Row]] = defaultdict(list)
    for row in rows:
        if not row.refusal and row.prefill is None and row.decode.count == 1:
            configurations[replace(row, id="", ttft=0.0, tpot=0.0)].append(row)
    for alike in configurations.values():
        rates = [throughput(row, row.ttft, row.tpot) for row in alike]
        if max(rates) <= (1 + REPEATED) * min(rates):
            yield alike[0]


def pairs(rows: Iterable[Row]) -> list[Pair]:
    """All pairs, by feature."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in measurements(rows):
        groups[row.engine, row.version, row.system, row.model, row.isl, row.osl, row.drawn].append(row)
    both = [couple for group in groups.values() for couple in product(group, group)]
    return [Pair(name, off, on) for name, differ in FEATURES.items() for off, on in both if differ(off, on)]


def sample(all_pairs: Sequence[Pair], limit: int) -> list[Pair]:
    """At most so many pairs of each feature, drawn at random."""
    generator = random.Random(1)
    by_feature = [[pair for pair in all_pairs if pair.feature == name] for name in FEATURES]
    return [pair for alike in by_feature for pair in generator.sample(alike, min(limit, len(alike)))]


def runs(row: Row) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Predicted throughput of a row by seeds, and by draws of what is not known of its step times."""
    engine = engine_of(row, row.decode)

    def run(seed: int, draw: Draw) -> dict[str, Any]:
        step_time = engine.step_time
        if draw is not None:
            step_time = step_time.vary(scores_of(step_time.unknowns(), 0, draw))
        means = simulated(row, step_time, engine.kv_tokens, chip(row.system), seed)
        return {METRIC: throughput(row, OVERHEAD + means.ttft, means.tpot)}

    return [run(seed, None) for seed in range(SEEDS if row.drawn else 1)], [run(0, draw) for draw in range(DRAWS)]


def drafts(folder: Path) -> list[dict[str, Any]]:
    """EAGLE drafts of gpt-oss-120b on one H200: the verdicts of `twin ablate` beside what was measured."""
    head = folder / "eagle-head.yaml"
    head.write_text(yaml.safe_dump(EAGLE_HEAD))
    section = {
        "method": "draft_model", "num_speculative_tokens": len(ACCEPTED), "acceptance_by_position": ACCEPTED,
        "draft_step_time": {"source": "roofline", "model": str(head), "hardware": "h200-sxm"},
    }  # fmt: skip
    verdicts = []
    for clients in (1, 2, 4, 8, 16, 32, 64, 128):
        document = {
            "schema": "twin.scenario/1", "kind": "serving", "name": f"drafts-{clients}", "detail": False,
            "workload": {
                "requests": max(4 * clients, 16), "prefill": {"distribution": "fixed", "mean": 1024},
                "decode": {"distribution": "fixed", "mean": 1024},
                "arrivals": {"process": "closed_loop", "concurrency": clients},
            },
            "engine": {"max_num_batched_tokens": 8192, "async_scheduling": False, "speculative_config": section},
            "step_time": {"source": "roofline", "model": "gpt-oss-120b", "hardware": "h200-sxm"},
        }  # fmt: skip
        ablation = prepare_ablation(document, folder / "scenario.yaml", names=["speculation"], replications=SEEDS)
        documents = {task.key: run_if_feasible(task) for task in ablation.sweep.tasks}
        for row in ablation.summarise(documents)["rows"]:
            sign = MEASURED_DRAFTS.get(row["value"])
            if sign is None or row["context"] != "alone" or (sign < 0 and clients == 1):
                continue
            names = {"feature": "EAGLE drafts", "off": f"{clients} clients", "on": row["value"], "measured": sign}
            verdicts.append(names | row["changes"][METRIC] | {"verdict": row["verdict"]})
    return verdicts


def judge(selection: Sequence[Pair], jobs: int) -> list[dict[str, Any]]:
    """The measured and the predicted change of each pair, and the verdict."""
    rows = list(dict.fromkeys(row for pair in selection for row in (pair.off, pair.on)))
    with ProcessPoolExecutor(jobs) as pool:
        results = dict(zip(rows, pool.map(runs, rows, chunksize=4), strict=True))
    verdicts = []
    for pair in selection:
        replications, draws = (
            [{METRIC: on[METRIC] / off[METRIC]} for on, off in zip(*runs_of_both, strict=True)]
            for runs_of_both in zip(results[pair.on], results[pair.off], strict=True)
        )
        if pair.on.decode != pair.off.decode:
            draws = with_layout_error(draws, engine_of(pair.on, pair.on.decode).step_time.unknowns())
        change = relative_changes(replications, draws)[METRIC]
        names = {"feature": pair.feature, "off": pair.off.id, "on": pair.on.id, "measured": pair.measured}
        verdicts.append(names | change | {"verdict": verdict(change, METRIC)})
    return verdicts


def outcome(row: Mapping[str, Any]) -> str:
    """Right, wrong, undecided, or "none" where the measured change is noise."""
    if abs(math.log1p(row["measured"])) <= NOISE:
        return "none"
    if row["verdict"] not in ("pays", "costs"):
        return "undecided"
    return "right" if (row["measured"] > 0) == (row["verdict"] == "pays") else "wrong"


def table(verdicts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By feature: pairs, those with a sign, those decided, the share of right verdicts among these, and the rest's."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in verdicts:
        counts[row["feature"]][outcome(row)] += 1
    return [line(name, outcomes) for name, outcomes in counts.items()] + [line("all", Counter(map(outcome, verdicts)))]


def line(name: str, counts: Counter[str]) -> dict[str, Any]:
    """One line of the table."""
    decided = counts["right"] + counts["wrong"]
    signed = decided + counts["undecided"]
    return {
        "feature": name,
        "pairs": counts.total(),
        "signed": signed,
        "decided": decided,
        "right": counts["right"] / decided if decided else None,
        "undecided": counts["undecided"] / signed if signed else None,
    }


def main() -> None:
    """Judge a sample of the pairs, print the table and the wrong verdicts, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=60, help="of each feature at most")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    verdicts = judge(sample(pairs(read_rows(options.package)), options.pairs), options.jobs)
    with tempfile.TemporaryDirectory() as folder:
        verdicts += drafts(Path(folder))
    lines = table(verdicts)
    for row in lines:
        print(row)
    for row in verdicts:
        if outcome(row) == "wrong":
            print(f"{row['feature']}: {row['off']} -> {row['on']}: {row['measured']:+.2f}, {row['change']:+.2f}")
    if options.write:
        RESULT.write_text(json.dumps(provenance("benchmarks.pays/1") | {"table": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
