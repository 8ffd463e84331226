"""The process behind a page answers the newest question alone, as `twin.simulate` would."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import twin
from latency_models.io.config_io import write_yaml
from tests.twin.page.scenarios import roofline
from twin.page.application import Worker
from twin.page.questions import LOADS, Inquiry, answer

Answer = tuple[int, str, dict[str, Any]]
LIMIT = 120.0
"""Seconds to wait for a process, on a machine that does much else."""


def question(**changes: Any) -> Inquiry:
    return Inquiry(roofline(**changes), Path("s.yaml"))


def all_told(inquiry: Inquiry, query: dict[str, str]) -> list[tuple[str, dict[str, Any]]]:
    messages: list[tuple[str, dict[str, Any]]] = []
    answer(inquiry, inquiry.choices(query), lambda kind, document: messages.append((kind, document)))
    return messages


def test_a_question_gets_a_draft_an_answer_and_curves() -> None:
    messages = all_told(question(), {})
    kinds = [kind for kind, _ in messages]
    assert kinds[:3] == ["draft", "full", "afd"]
    assert set(kinds[3:]) == {"pareto"}
    assert len(kinds[3:]) == 4 * len(LOADS)  # tensor parallel 1, 2, 4, 8
    full = messages[1][1]
    assert full["summary"]["requests"] == 320
    theory = messages[2][1]["theory"]
    assert theory["r_star"] > 0
    answer = messages[3][1]
    assert (answer["name"], answer["load"], answer["rate"]) == ("TP 1", 1.0, 4.0)


def test_an_answer_is_that_of_the_scenario_written(tmp_path: Path) -> None:
    inquiry = question()
    query = {"rate": "6", "seqs": "32", "layout": "apart"}
    (full,) = [document for kind, document in all_told(inquiry, query) if kind == "full"]
    (tmp_path / "s.yaml").write_text(write_yaml(inquiry.changed(inquiry.choices(query))))
    assert twin.simulate(tmp_path / "s.yaml").document["summary"] == full["summary"]


def test_what_cannot_be_is_told_in_one_line_and_ends_the_answer() -> None:
    ((kind, document),) = all_told(question(), {"model": "llama-3.1-405b"})
    assert kind == "error"
    assert "weights leave room for a KV cache" in document["text"]


def test_points_that_are_overloaded_or_do_not_fit_say_so() -> None:
    points = [document for kind, document in all_told(question(), {"model": "llama-3.1-70b", "tp": "4", "rate": "14"})
              if kind == "pareto"]  # fmt: skip
    reasons = {point["name"]: point.get("reason", "") for point in points}
    assert "weights leave room" in reasons["TP 1"]
    assert any(point.get("reason", "").startswith("overloaded at") for point in points)
    assert all(point["user"] is None for point in points if point.get("reason"))


def test_other_step_times_and_closed_loops_have_no_afd_curve() -> None:
    linear = {"source": "linear", "overhead": 0.01, "per_token": 1e-4, "per_kv_token": 1e-7}
    engine = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "num_gpu_blocks": 4000}
    messages = all_told(question(step_time=linear, engine=engine), {})
    (curve,) = [document for kind, document in messages if kind == "afd"]
    assert "needs step times of source roofline" in curve["reason"]
    assert {document["name"] for kind, document in messages if kind == "pareto"} == {"as chosen"}


@pytest.fixture
def worker() -> Iterator[tuple[Worker, queue.Queue[Answer]]]:
    answers: queue.Queue[Answer] = queue.Queue()
    page_worker = Worker(question(), lambda *message: answers.put(message))
    yield page_worker, answers
    page_worker.close()


def test_a_new_question_stops_the_one_before(worker: tuple[Worker, queue.Queue[Answer]]) -> None:
    """The first question's curves, some 24 simulations, are not computed once the second has come."""
    at_work, answers = worker
    inquiry = question()
    first = at_work.ask(inquiry.choices({}))
    while answers.get(timeout=LIMIT)[1] != "full":
        pass
    second = at_work.ask(inquiry.choices({"rate": "5"}))
    messages = [answers.get(timeout=LIMIT)]
    while messages[-1][1] != "done":
        messages.append(answers.get(timeout=LIMIT))
    of_first = [kind for number, kind, _ in messages if number == first]
    of_second = [kind for number, kind, _ in messages if number == second]
    assert len(of_first) < 1 + 4 * len(LOADS)
    assert "done" not in of_first
    assert of_second[:3] == ["draft", "full", "afd"]
    assert len(of_second) == 4 + 4 * len(LOADS)
    assert [number for number, _, _ in messages] == sorted(number for number, _, _ in messages)


def test_many_questions_at_once_get_one_answer(worker: tuple[Worker, queue.Queue[Answer]]) -> None:
    at_work, answers = worker
    inquiry = question()
    (process,) = (child for child in multiprocessing.active_children() if child.name == "what-if")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)  # however slowly they are asked, all have come when it goes on
    numbers = [at_work.ask(inquiry.choices({"rate": str(rate)})) for rate in range(1, 12)]
    os.kill(process.pid, signal.SIGCONT)
    finished = []
    while numbers[-1] not in finished:
        number, kind, _ = answers.get(timeout=LIMIT)
        finished += [number] if kind == "done" else []
    assert finished == [numbers[-1]]


def test_a_closed_worker_ends_its_process(worker: tuple[Worker, queue.Queue[Answer]]) -> None:
    at_work, _ = worker
    at_work.close()
    assert not at_work.alive


def test_a_replayed_trace_is_answered_with_its_own_requests(tmp_path: Path) -> None:
    rows = "".join(f"{i / 4},100,{5 + i % 3}\n" for i in range(40))
    (tmp_path / "t.csv").write_text("arrival,prompt_tokens,output_tokens\n" + rows)
    workload = {"trace": {"path": "t.csv"}, "arrivals": {"process": "replay"}}
    messages = all_told(Inquiry(roofline(workload=workload), tmp_path / "s.yaml"), {})
    (full,) = [document for kind, document in messages if kind == "full"]
    assert full["summary"]["requests"] == 40
    reasons = {document.get("reason") for kind, document in messages if kind == "pareto"}
    assert reasons == {"no other loads: arrivals are recorded"}
