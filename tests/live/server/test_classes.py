"""Classes and tenants from headers: the order of waiting requests, shedding with Retry-After, and metrics by class."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from live.backend import EngineBackend
from live.models.decoder import Decoder
from live.server.options import ServiceClass
from schedulers.admission_control import AdmissionLimits, WaitingLimits
from tests.live.server.conftest import Setting, config, running
from tests.live.server.wire import Answer

CLASSES = {"chat": ServiceClass(0, 1.0), "batch": ServiceClass(1, 30.0)}
BODY: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True}


class Held:
    """Requests that have been sent to a server whose engine stands still.

    Attributes:
        answers: in the order in which they came, when the engine has gone on.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.answers = list[tuple[str, Answer]]()
        self._threads: list[threading.Thread] = []

    def send(self, tenant: str, service_class: str, **fields: Any) -> None:
        """Send a request, and wait until the engine has it."""
        name = f"{tenant} {service_class}"
        waiting = self.waiting()

        def work() -> None:
            posted = self.setting.client.post_as(tenant, service_class, "/v1/completions", **{**BODY, **fields})
            self.answers.append((name, posted))

        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()
        deadline = time.monotonic() + 20
        while self.waiting() == waiting and time.monotonic() < deadline:
            time.sleep(0.002)
        assert self.waiting() == waiting + 1

    def waiting(self) -> int:
        return int(self.setting.on_loop(lambda: self.setting.engine.core.num_waiting))

    def next_served(self) -> tuple[str, str]:
        """Tenant and class of the request that its queue would serve next."""

        def look() -> tuple[str, str]:
            sequence = self.setting.engine.core.queues[0].peek()
            return sequence.request.tenant, sequence.request.service_class

        values: tuple[str, str] = self.setting.on_loop(look)
        return values

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()


@contextmanager
def standing_still(decoder: Decoder, **settings: Any) -> Iterator[Held]:
    """A server whose engine begins its steps at the end of the block."""
    with running(decoder, None, engine=config(max_num_seqs=1, one_shot=None, **settings), classes=CLASSES) as setting:
        backend = setting.service.backend
        assert isinstance(backend, EngineBackend)
        setting.on_loop(lambda: setattr(backend, "_stepping", True))
        requests = Held(setting)
        yield requests
        setting.on_loop(lambda: setting.loop.call_soon(backend._step))
        requests.join()
        assert setting.settled()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fcfs", ("a", "batch")), ("priority", ("b", "chat")), ("deadline", ("b", "chat")), ("fair", ("a", "batch"))],
)
def test_the_class_decides_who_is_next(decoder: Decoder, policy: str, expected: tuple[str, str]) -> None:
    with standing_still(decoder, scheduling_policy=policy) as requests:
        requests.send("a", "batch")
        requests.send("b", "chat")
        assert requests.next_served() == expected
    assert [answer.status for _, answer in requests.answers] == [200, 200]


def test_the_priority_of_the_body_goes_before_that_of_the_class(decoder: Decoder) -> None:
    with standing_still(decoder, scheduling_policy="priority") as requests:
        requests.send("a", "chat")
        requests.send("b", "batch", priority=-1)
        assert requests.next_served() == ("b", "batch")


def test_a_tenant_with_too_many_requests_gets_429_and_others_do_not(decoder: Decoder) -> None:
    limits = AdmissionLimits(max_waiting_per_tenant=2)
    with standing_still(decoder, scheduling_policy="fair", admission_control=limits) as requests:
        requests.send("flood", "batch")
        requests.send("flood", "batch")
        shed = requests.setting.client.post_as("flood", "batch", "/v1/completions", **BODY)
        assert (shed.status, shed.error["code"], shed.error["type"]) == (429, "overloaded", "rate_limit_error")
        assert shed.headers["retry-after"] == "1"
        requests.send("modest", "chat")
        page = requests.setting.client.get("/metrics").body.decode()
        name = 'serving_twin:requests_shed_total{model_name="tiny",'
        assert f'{name}reason="tenant_waiting",service_class="batch"}} 1.0' in page.replace(", ", ",")
    assert [answer.status for _, answer in requests.answers] == [200, 200, 200]


def test_a_full_queue_gives_503_and_a_stream_begins_with_the_error(decoder: Decoder) -> None:
    limits = AdmissionLimits(WaitingLimits(max_waiting=1))
    with standing_still(decoder, admission_control=limits) as requests:
        requests.send("a", "chat")
        for stream in (False, True):
            shed = requests.setting.client.post_as("b", "chat", "/v1/completions", stream=stream, **BODY)
            assert (shed.status, shed.error["code"]) == (503, "overloaded")
            assert int(shed.headers["retry-after"]) >= 1
        several = requests.setting.client.post_as("b", "chat", "/v1/completions", **{**BODY, "n": 2})
        assert several.status == 503
        assert requests.waiting() == 1  # of several outputs none is left behind


def test_a_limit_of_a_class_leaves_room_for_others(decoder: Decoder) -> None:
    limits = AdmissionLimits(of_class=(("batch", WaitingLimits(max_waiting=1)),))
    with standing_still(decoder, admission_control=limits) as requests:
        requests.send("a", "batch")
        assert requests.setting.client.post_as("a", "batch", "/v1/completions", **BODY).status == 503
        requests.send("a", "chat")


def test_latencies_by_class_are_in_the_metrics(decoder: Decoder) -> None:
    with running(decoder, None, classes=CLASSES) as setting:
        for service_class in ("chat", "chat", "batch", ""):
            assert setting.client.post_as("a", service_class, "/v1/completions", **BODY).status == 200
        page = setting.client.get("/metrics").body.decode()
    for name in ("time_to_first_token", "e2e_request_latency"):
        for service_class, count in (("chat", 2), ("batch", 1), ("", 1)):
            labels = f'{{model_name="tiny",service_class="{service_class}"}}'
            assert f"serving_twin:class_{name}_seconds_count{labels} {count}.0" in page


def test_headers_that_are_refused(decoder: Decoder) -> None:
    with running(decoder, None, classes=CLASSES) as setting:
        unknown = setting.client.post_as("a", "chta", "/v1/completions", **BODY)
        assert unknown.status == 400
        assert unknown.error["message"] == "header X-Request-Class: expected one of chat, batch, found chta"
        assert setting.client.post_as("a" * 129, "chat", "/v1/completions", **BODY).status == 400
    with running(decoder, None) as setting:  # without classes the header says nothing
        assert setting.client.post_as("a", "chta", "/v1/completions", **BODY).status == 200
