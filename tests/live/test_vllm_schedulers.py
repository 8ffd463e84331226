"""Policies and step log inside vLLM's scheduler, against a stand-in with the part of its interface that they use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from latency_models.sources.vllm_step_log.spec import StepRegression
from latency_models.sources.vllm_step_log.step_log import read_step_log
from live.vllm.policies import RunsOneShots, SizesChunks, running_work
from live.vllm.settings import read_settings
from live.vllm.step_log import CLOCKS, RecordsSteps
from schedulers.step_policies import SloChunks
from workloads.errors import BadInput

ARRIVALS = count()
SLO = {"policy": "slo", "slo_seconds": 0.02, "tokens": [1, 100, 200], "seconds": [0.002, 0.01, 0.03], "max_tokens": 512}


class FakeRequest:
    """A request with vLLM's names."""

    def __init__(self, name: str, prompt: int, max_tokens: int) -> None:
        self.request_id = name
        self.num_prompt_tokens = prompt
        self.max_tokens = max_tokens
        self.num_tokens = prompt
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.is_prefill_chunk = True

        self.arrival = next(ARRIVALS)

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens

    def __lt__(self, other: FakeRequest) -> bool:
        return self.arrival < other.arrival


class FakeQueue(deque[FakeRequest]):
    """A queue with vLLM's names."""

    add_request = deque.append
    pop_request = deque.popleft
    prepend_request = deque.appendleft

    def peek_request(self) -> FakeRequest:
        return self[0]

    def remove_requests(self, requests: set[FakeRequest]) -> None:
        rest = [request for request in self if request not in requests]
        self.clear()
        self.extend(rest)


class FakeScheduler:
    """vLLM's order: running requests first, then waiting ones, within `max_num_scheduled_tokens`; memory is ample."""

    def __init__(self, vllm_config: Any) -> None:
        self.max_num_scheduled_tokens = 256
        self.requests: dict[str, FakeRequest] = {}
        self.running: list[FakeRequest] = []
        self.waiting: Any = FakeQueue()
        self.max_num_running_reqs = 4
        self.kv_cache_manager = SimpleNamespace(usage=0.25)

    def add(self, request: FakeRequest) -> None:
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def schedule(self) -> Any:
        budget, scheduled = self.max_num_scheduled_tokens, dict[str, int]()
        for request in self.running:
            budget -= self._schedule(request, budget, scheduled)
        while budget > 0 and self.waiting and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.peek_request()
            assert self.waiting.pop_request() is request
            self.running.append(request)
            budget -= self._schedule(request, budget, scheduled)
        return SimpleNamespace(
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
        )  # fmt: skip

    def _schedule(self, request: FakeRequest, budget: int, scheduled: dict[str, int]) -> int:
        missing = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        if (tokens := min(missing, budget)) > 0:
            scheduled[request.request_id] = tokens
            request.num_computed_tokens += tokens
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
        return tokens

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests[name]
            if not request.is_prefill_chunk:
                request.num_tokens += 1
                if request.num_tokens == request.num_prompt_tokens + request.max_tokens:
                    self.running.remove(self.requests.pop(name))
        return "outputs"

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def shutdown(self) -> None:
        pass


class Scheduler(RecordsSteps, SizesChunks, RunsOneShots, FakeScheduler):
    """The classes of `live.vllm.schedulers.PolicyScheduler` over a scheduler that needs no vLLM."""


def scheduler(**settings: Any) -> Scheduler:
    config = SimpleNamespace(
        additional_config={"serving_twin": settings},
        parallel_config=SimpleNamespace(data_parallel_rank=0, tensor_parallel_size=1, pipeline_parallel_size=1),
        speculative_config=None,
        cache_config=SimpleNamespace(num_gpu_blocks=100, block_size=32),
        model_config=SimpleNamespace(model="a, model"),
    )
    return Scheduler(vllm_config=config)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The readings of the clock to come."""
    readings: list[float] = []
    monkeypatch.setitem(CLOCKS, "wall", lambda: readings.pop(0))
    yield readings
    assert not readings


def run(engine: Scheduler, steps: int) -> list[dict[str, int]]:
    """The tokens of each step by request."""
    outputs = []
    for _ in range(steps):
        outputs.append(engine.schedule())
        engine.update_from_output(outputs[-1], None)
    return [output.num_scheduled_tokens for output in outputs]


def test_prompt_tokens_of_each_step_are_those_of_the_policy() -> None:
    engine, policy = scheduler(chunking=SLO), SloChunks([1, 100, 200], [0.002, 0.01, 0.03], 0.02, 16, 512)
    engine.add(FakeRequest("a", 10, 20))
    engine.add(FakeRequest("b", 10, 20))
    assert run(engine, 1) == [{"a": 10, "b": 10}]
    engine.add(FakeRequest("c", 700, 20))
    chunk = policy.max_prefill_tokens(2)
    assert 16 < chunk < 256
    assert run(engine, 3) == [{"a": 1, "b": 1, "c": chunk}] * 3


def test_the_engines_own_budget_holds_as_well() -> None:
    engine = scheduler(chunking=SLO | {"slo_seconds": 10.0})
    engine.add(FakeRequest("a", 700, 2))
    assert run(engine, 1) == [{"a": 256}]


def test_without_settings_nothing_changes() -> None:
    engine = scheduler()
    engine.add(FakeRequest("a", 300, 2))
    assert run(engine, 2) == [{"a": 256}, {"a": 44}]


def test_a_request_whose_last_token_is_in_flight_takes_no_row() -> None:
    request = FakeRequest("a", 10, 2)
    request.num_tokens = 11
    request.num_computed_tokens = 10
    request.is_prefill_chunk = False
    chunks = [FakeRequest("b", 30, 2), FakeRequest("c", 30, 2)]
    chunks[0].num_computed_tokens = 7
    for single_rows in (False, True):
        assert running_work([request, *chunks], single_rows) == (1, 11, 11, 7)
    request.num_computed_tokens = 11
    request.num_output_placeholders = 1
    assert running_work([request]) == (0, 0, 0, 0)
    request.max_tokens = 3
    assert running_work([request]) == (1, 12, 12, 0)


def test_the_log_has_every_batch_and_its_time(tmp_path: Path, ticks: list[float]) -> None:
    file = tmp_path / "logs" / "steps.csv"
    engine = scheduler(step_log=str(file), experiment="one", workload="chat")
    engine.add(FakeRequest("a", 300, 3))
    ticks += [1.0, 1.5, 1.6, 2.0, 2.0, 2.25, 2.25, 2.5]  # each step: scheduled, processed
    run(engine, 4)
    engine.add(FakeRequest("b", 5, 1))  # after 7 idle seconds
    ticks += [9.5, 9.75]
    run(engine, 1)
    engine.shutdown()
    log = read_step_log(file)
    assert log.seconds.tolist() == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.25])
    assert log.prompt_tokens.tolist() == [256, 44, 0, 0, 5]
    assert log.prompts.tolist() == [1, 1, 0, 0, 1]
    assert log.decodes.tolist() == [0, 0, 1, 1, 0]
    assert log.kv_tokens.tolist() == [256, 300, 301, 302, 5]
    assert log.origin.model == "a, model"
    assert log.executed() is log
    header, first, *_ = file.read_text().splitlines()
    assert len(header.split(",")) == len(first.replace('"a, model"', "model").split(","))


def test_steps_that_overlap_add_up(tmp_path: Path, ticks: list[float]) -> None:
    """With async scheduling a step is scheduled while the one before runs, and lasts from its end to its own."""
    engine = scheduler(step_log=str(tmp_path / "steps.csv"))
    engine.add(FakeRequest("a", 10, 30))
    engine.add(FakeRequest("b", 300, 30))
    ticks += [1.0, 1.1, 2.0, 2.1, 3.5]
    first, second = engine.schedule(), engine.schedule()
    engine.update_from_output(first, None)
    third = engine.schedule()
    engine.update_from_output(second, None)
    ticks += [4.0]
    engine.update_from_output(third, None)
    engine.shutdown()
    assert read_step_log(tmp_path / "steps.csv").seconds.tolist() == pytest.approx([1.0, 1.5, 0.5])


def test_a_restarted_server_appends_a_run_of_its_own(tmp_path: Path, ticks: list[float]) -> None:
    file = tmp_path / "steps.csv"
    for name in ("one", "two"):
        engine = scheduler(step_log=str(file), experiment=name)
        for i in range(6):
            engine.add(FakeRequest(str(i), 20 + i, 4))
            ticks += [i, i + 0.1 + 0.01 * i]
            run(engine, 1)
        engine.shutdown()
    log = read_step_log(file)
    assert log.run.tolist() == ["one"] * 6 + ["two"] * 6
    assert log.step.tolist() == [*range(1, 7)] * 2
    assert StepRegression().fit(log).points_ == 12  # none is left out or moved to another row


def test_settings_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("chunking: {policy: static, tokens: 64}\n")
    policy = read_settings({"serving_twin": str(file)}).chunk_policy()
    assert policy.max_prefill_tokens(10) == 54


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"chunks": 3}, "chunks"),
        ({"chunking": {"policy": "slo", "slo_seconds": -1}}, "slo_seconds"),
        (7, "expected fields, or the path of a YAML file"),
    ],
)
def test_bad_settings_are_refused_in_one_line(section: Any, text: str) -> None:
    with pytest.raises(BadInput, match=text) as error:
        read_settings({"serving_twin": section})
    assert "\n" not in str(error.value)


def test_one_shots_pass_chats_that_wait_for_a_place() -> None:
    engine = scheduler(one_shot={"tokens": 100, "sequences": 2})
    for name in ("a", "b", "c"):  # 4 places, of which 2 are for one-shots
        engine.add(FakeRequest(name, 10, 30))
    for i in range(3):
        engine.add(FakeRequest(f"judge {i}", 30, 1))
    assert run(engine, 2) == [{"a": 10, "b": 10, "judge 0": 30, "judge 1": 30}, {"a": 1, "b": 1, "judge 2": 30}]
    assert len(engine.waiting) == 1


def test_without_the_lane_they_wait_behind_chats() -> None:
    engine = scheduler()
    for i in range(5):
        engine.add(FakeRequest(f"chat {i}", 10, 30))
    engine.add(FakeRequest("judge", 30, 1))
    assert all("judge" not in step for step in run(engine, 5))


def test_a_one_shot_prompt_runs_whole_or_waits() -> None:
    engine = scheduler(one_shot={"tokens": 100, "sequences": 2})
    engine.add(FakeRequest("judge 0", 70, 1))
    engine.add(FakeRequest("judge 1", 70, 1))
    engine.add(FakeRequest("chat", 200, 9))
    engine.add(FakeRequest("judge 2", 101, 1))  # no step holds it whole: it is chunked, in the other lane
    assert run(engine, 3) == [{"judge 0": 70, "chat": 186}, {"chat": 14, "judge 1": 70, "judge 2": 101}, {"chat": 1}]


def test_aborted_requests_leave_their_lanes() -> None:
    engine = scheduler(one_shot={"tokens": 100, "sequences": 2})
    chat, judge = FakeRequest("chat", 10, 9), FakeRequest("judge", 10, 1)
    for request in (chat, judge):
        engine.add(request)
    assert list(engine.waiting) == [judge, chat]
    engine.waiting.remove_requests([judge])
    assert list(engine.waiting) == [chat]
