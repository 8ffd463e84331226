"""From a grid to a file that simulates: with a clock that is made up, and once with the real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.microbenchmark import Case, Timing
from latency_models.calibration_loader import load_calibration
from latency_models.io.config_io import write_yaml
from latency_models.sources.calibration_file import MeasuredCalibration, read_measured_calibration
from latency_models.sources.kernel_tables.settings import Communication, note, resolve
from live.calibration import calibrate as calibration
from live.calibration.assembling import padded_rows, step_batch
from live.calibration.communication import measure_link, rank_counts, round_trips
from live.calibration.operations import LINEAR
from live.calibration.plan import Journal, Plan
from schedulers.batches import Batch
from twin.cli import run
from workloads.errors import BadInput

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TINY = EXAMPLES / "models" / "tiny-llama.json"
GROUPS = ("layers", "attention", "head", "quantised")

ALPHA, BETA = 2e-6, 3e-5
OVERHEAD = 5e-4


def made_up(case: Case) -> float:
    """Seconds of a machine that is linear, but for gate_up_proj, whose weights take 100 µs to read."""
    sizes = dict(case.sizes)
    if case.operation == "gate_up_proj":
        return max(1e-4, 4e-6 * sizes["tokens"])
    if "chunk" in sizes or "batch" in sizes:
        decodes = sizes.get("batch", 0) * (ALPHA + 1e-8 * sizes.get("context", 0))
        return BETA + decodes + sizes.get("chunk", 0) * (ALPHA + 1e-8 * sizes.get("before", 0))
    return BETA + ALPHA * next(iter(sizes.values()))


class Clock:
    """Times without running anything; may break off after some measurements."""

    def __init__(self, seconds: Callable[[Case], float] = made_up, breaks_after: int | None = None) -> None:
        self.seconds = seconds
        self.left = breaks_after
        self.asked = 0

    def __call__(self, case: Case) -> Timing:
        if self.left == self.asked:
            raise KeyboardInterrupt
        self.asked += 1
        return Timing(self.seconds(case), 0.0, 5, 1)


def nothing(text: str) -> None:
    """Progress that is not shown."""


def calibrated(plan: Plan, output: Path, clock: Clock) -> MeasuredCalibration:
    return calibration.calibrate(plan, calibration.open_journal(plan, output), output, nothing, clock)


@pytest.fixture
def plan() -> Plan:
    return calibration.make_plan(TINY, "cpu", groups=GROUPS)


def test_a_known_machine_is_recovered(plan: Plan, tmp_path: Path) -> None:
    file = calibrated(plan, tmp_path / "a" / "new" / "folder" / "c.yaml", Clock())
    for name in ("qkv_proj", "act_fn", "lm_head", "w4/o", "ec/down"):
        (line,) = file.operations[name].lines
        assert line.alpha == pytest.approx(ALPHA)
        assert line.beta == pytest.approx(BETA)
    for name, operation in file.operations.items():
        assert operation.repeat_spread == 0
        assert operation.allowed == 0.05
        assert operation.held_out.median < 1e-6 or name == "gate_up_proj"
        assert operation.holds
    lines = {line.where: line for line in file.operations["decode_attention"].lines}
    assert lines["batch 8"].alpha == pytest.approx(8e-8)
    assert lines["batch 8"].beta == pytest.approx(BETA + 8 * ALPHA)


def test_a_knee_is_split_not_averaged(plan: Plan, tmp_path: Path) -> None:
    file = calibrated(plan, tmp_path / "c.yaml", Clock())
    flat, rising = file.operations["gate_up_proj"].lines
    assert (flat.range[1], flat.alpha, flat.beta) == (24, 0.0, pytest.approx(1e-4))
    assert (rising.range[0], rising.alpha) == (32, pytest.approx(4e-6))


def test_what_does_not_hold_is_said(plan: Plan, tmp_path: Path) -> None:
    """A machine that is twice as slow at the sizes that are held out: no line through the others finds them."""
    slow_sizes = set(plan.grid.held_tokens)

    def uneven(case: Case) -> float:
        slow = case.operation == "o_proj" and case.sizes["tokens"] in slow_sizes
        return made_up(case) * (2 if slow else 1)

    file = calibrated(plan, tmp_path / "c.yaml", Clock(uneven))
    o_proj = file.operations["o_proj"]
    assert not o_proj.holds
    assert o_proj.held_out.median == pytest.approx(0.5)
    assert file.operations["qkv_proj"].holds


def test_a_machine_that_does_not_repeat_itself_is_allowed_more(plan: Plan, tmp_path: Path) -> None:
    calls: dict[str, int] = {}

    def restless(case: Case) -> float:
        key = f"{case.operation} {case.sizes}"
        calls[key] = calls.get(key, 0) + 1
        return made_up(case) * (1 + 0.0199 * calls[key])  # rounds at 1.0199 to 1.0796

    file = calibrated(plan, tmp_path / "c.yaml", Clock(restless))
    operation = file.operations["qkv_proj"]
    assert operation.repeat_spread == pytest.approx(0.0597 / 1.04975)
    assert operation.allowed == 0.1
    assert operation.lines[0].alpha == pytest.approx(1.0199 * ALPHA)


def test_points_that_do_not_settle_go_through_more_rounds(plan: Plan, tmp_path: Path) -> None:
    calls: dict[int, int] = {}

    def disturbed(case: Case) -> float:
        """o_proj takes 4, 3, 2, 1 and 1 times as long, and then it is enough."""
        if case.operation != "o_proj":
            return made_up(case)
        tokens = case.sizes["tokens"]
        calls[tokens] = calls.get(tokens, 0) + 1
        return made_up(case) * max(5 - calls[tokens], 1)

    clock = Clock(disturbed)
    file = calibrated(plan, tmp_path / "c.yaml", clock)
    assert set(calls.values()) == {5}
    assert clock.asked == plan.count() + len(calls)
    operation = file.operations["o_proj"]
    assert operation.lines[0].alpha == pytest.approx(ALPHA)
    assert operation.repeat_spread == pytest.approx(1.2)  # (4 - 1) / 2.5


def test_a_killed_run_is_taken_up(plan: Plan, tmp_path: Path) -> None:
    output = tmp_path / "c.yaml"
    uninterrupted = Clock()
    expected = calibrated(plan, tmp_path / "other.yaml", uninterrupted)
    first = Clock(breaks_after=100)
    with pytest.raises(KeyboardInterrupt):
        calibrated(plan, output, first)
    assert not output.exists()
    journal = calibration.journal_of(output)
    journal.write_text(journal.read_text() + '{"key": "cut sho')
    second = Clock()
    file = calibrated(plan, output, second)
    assert first.asked == 100
    assert first.asked + second.asked == uninterrupted.asked == plan.count()
    assert file.operations == expected.operations
    assert file.tables == expected.tables
    third = Clock()
    assert calibrated(plan, output, third) == file
    assert third.asked == 0


def test_another_plan_begins_anew(plan: Plan, tmp_path: Path) -> None:
    output = tmp_path / "c.yaml"
    calibrated(plan, output, Clock())
    half = calibration.make_plan(TINY, "cpu", "bfloat16", GROUPS)
    assert not calibration.open_journal(half, output).entries


def test_the_file_simulates_what_was_measured(plan: Plan, tmp_path: Path) -> None:
    output = tmp_path / "c.yaml"
    file = calibrated(plan, output, Clock())
    assert read_measured_calibration(output) == file
    step = file.step_time().seconds(Batch([], [None] * 8, 8 * 256, 256))
    layer = 2 * (BETA + 8 * ALPHA) + 5 * (BETA + 8 * ALPHA) + 1e-4 + (BETA + 8 * (ALPHA + 1e-8 * 256))
    edges = 4 * (BETA + 8 * ALPHA)  # embedding, last norm, head, sampler
    assert step == pytest.approx(4 * layer + edges)


def test_captured_steps_compute_padded_rows(plan: Plan, tmp_path: Path) -> None:
    assert [rows for rows in padded_rows() if 40 < rows < 400] == [48, 64, 96, 128, 192, 256, 320, 384]
    file = calibrated(plan, tmp_path / "c.yaml", Clock())
    on_gpu = file.model_copy(update={"capture_sizes": padded_rows()})
    five, eight = (Batch([], [None] * n, n * 256, 256) for n in (5, 8))
    plain, padded = file.step_time(), on_gpu.step_time()
    rows = 4 * (2 + 5) + 2  # linear in the rows: qkv and the like of four layers, embedding, last norm
    assert padded.seconds(five) - plain.seconds(five) == pytest.approx(rows * 3 * ALPHA)
    assert padded.seconds(eight) == plain.seconds(eight)


def test_overhead_is_what_whole_steps_take_more(tmp_path: Path) -> None:
    plan = calibration.make_plan(TINY, "cpu", groups=(*GROUPS, "overhead"))
    bare = calibrated(calibration.make_plan(TINY, "cpu", groups=GROUPS), tmp_path / "bare.yaml", Clock()).step_time()

    def with_steps(case: Case) -> float:
        if case.operation != "whole_step":
            return made_up(case)
        sizes = case.sizes
        return OVERHEAD + 1.25 * bare.seconds(step_batch(sizes["chunk"], 0, sizes["decodes"], sizes["context"]))

    file = calibrated(plan, tmp_path / "c.yaml", Clock(with_steps))
    assert file.overhead.seconds == pytest.approx(OVERHEAD)
    assert file.overhead.factor == pytest.approx(1.25)
    assert file.overhead.median_error == pytest.approx(0, abs=1e-9)
    assert file.step_time().seconds(Batch([], [None], 64, 64)) == pytest.approx(
        OVERHEAD + 1.25 * bare.seconds(Batch([], [None], 64, 64))
    )


def test_tables_of_compensated_layers(plan: Plan, tmp_path: Path) -> None:
    file = calibrated(plan, tmp_path / "c.yaml", Clock())
    assert file.ec.tokens == list(plan.grid.quantised)
    assert file.ec.w4["qkv"][4] == pytest.approx(BETA + 16 * ALPHA)
    assert file.ec.attention[4] == pytest.approx(5 * (BETA + 16 * ALPHA))  # a prompt, two norms, rope, activation


def test_lines_feed_an_afd_scenario_only_with_messages(plan: Plan, tmp_path: Path) -> None:
    output = tmp_path / "c.yaml"
    file = calibrated(plan, output, Clock())
    assert file.skipped["communication"] == "only with --ops communication"
    with pytest.raises(BadInput, match="communication"):
        load_calibration(output)
    line = file.ffn
    assert line is not None
    with_messages = file.model_copy(update={"communication": line})
    output.write_text(with_messages.to_yaml())
    assert load_calibration(output).step_line("attention")[0] == file.attention.alpha  # type: ignore[union-attr]


def test_attention_alone_is_judged(tmp_path: Path) -> None:
    file = calibrated(calibration.make_plan(TINY, "cpu", groups=("attention",)), tmp_path / "c.yaml", Clock())
    assert file.tables is None
    for operation in file.operations.values():
        assert operation.held_out.median < 1e-6


def test_messages_go_there_and_back() -> None:
    seconds = round_trips([1, 4096], 1024)
    assert len(seconds) == 2
    assert min(seconds) > 0


def test_without_attention_there_are_no_step_times(tmp_path: Path) -> None:
    plan = calibration.make_plan(TINY, "cpu", groups=("layers",))
    file = calibrated(plan, tmp_path / "c.yaml", Clock())
    assert set(LINEAR) <= set(file.operations)
    with pytest.raises(BadInput, match="tables"):
        file.step_time()


@pytest.mark.slow
def test_a_minute_grid_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real clock, few points: the command writes a file, figures and a table, and `twin simulate` takes the file.

    Errors of these few points, timed so briefly, are not judged."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    command = ["calibrate", "run", "--device", "cpu", "--model", str(TINY), "--quick", "-o"]
    try:
        code = run([*command, "tiny-llama-cpu.calibration.yaml", "--json"])
    finally:
        torch.set_num_threads(threads)
    document = json.loads(capsys.readouterr().out)
    assert code in (0, 4)
    assert code == (0 if all(operation["holds"] for operation in document["operations"].values()) else 4)
    assert document["provenance"]["method"] == "measured"
    figures = {path.name for path in (tmp_path / "tiny-llama-cpu.calibration-figures").iterdir()}
    assert figures == {f"{name.replace('/', '-')}.svg" for name in document["operations"]}
    (tmp_path / "scenario.yaml").write_text((EXAMPLES / "tiny-llama-cpu.yaml").read_text())
    assert run(["simulate", "scenario.yaml", "--json", "--no-figures", "--set", "workload.requests=10"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["summary"]["output_throughput"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device: got 'tpu', expected cpu or cuda"),
        (["--device", "cpu", "--ops", "layers,everything"], "--ops: got 'everything'"),
        (["--device", "cpu", "--dtype", "int8"], "--dtype: got 'int8'"),
    ],
)
def test_bad_arguments_are_told(arguments: list[str], message: str, tmp_path: Path, refusal) -> None:
    command = ["calibrate", "run", "--model", str(TINY), "-o", str(tmp_path / "c.yaml")]
    assert message in refusal(*command, *arguments)


def test_all_reduces_are_a_link_file(tmp_path: Path) -> None:
    """Two processes, in a round that the journal keeps; a scenario's communication can name the file."""
    journal = Journal(tmp_path / "journal", {})
    advanced: list[str] = []
    link = measure_link(journal, 1, quick=True, advance=advanced.append)
    assert link.kind == "measured"
    assert len(advanced) == len(rank_counts())
    again = measure_link(Journal(tmp_path / "journal", {}), 1, quick=True, advance=advanced.append)
    assert again == link
    (tmp_path / "mine.yaml").write_text(write_yaml(link.model_dump(mode="json", by_alias=True)))
    communication = resolve(Communication(link="mine.yaml"), tmp_path)
    measured = link.all_reduce[0]
    assert communication.all_reduce(2, measured.bytes[-1] / 2) == max(measured.seconds)
    assert note(communication) is None or communication.spread > 0.3
