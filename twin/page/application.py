"""The server of what-if pages: each open page has its widgets, and a process that answers."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlencode

import yaml
from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document as Charts
from bokeh.events import DocumentReady
from bokeh.models import CustomJS
from bokeh.server.server import Server
from tornado.httputil import HTTPServerRequest
from tornado.ioloop import IOLoop
from tornado.web import HTTPError

from reports.theme import asset
from twin.page.questions import Choices, Document, Inquiry, answer
from twin.page.view import View
from workloads.errors import BadInput

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.sharedctypes import Synchronized
    from types import FrameType

Answered = Callable[[int, str, Document], None]
"""Called in a thread with a question's number, the kind of answer, and the answer; kind `done` is the last."""


class Outdated(BaseException):
    """A newer question has come. Not an `Exception`, so that no handler on the way takes it for an error."""


class Worker:
    """Answers questions about one scenario, always the newest alone.

    A question that comes while an earlier one is computed stops it at once, except before its quick draft: answers then
    follow a slider that does not rest.
    """

    def __init__(self, inquiry: Inquiry, answered: Answered) -> None:
        context = multiprocessing.get_context("spawn")  # a server has threads, which a fork would not copy
        self._newest = context.Value("q", 0)
        self._connection, far_end = context.Pipe()
        # A copy without what it has computed: the process reads the scenario, and its plug-ins, itself.
        self._process = context.Process(
            target=_serve, args=(replace(inquiry), far_end, self._newest), daemon=True, name="what-if"
        )
        self._ready = False
        self._process.start()
        far_end.close()
        self._reader = threading.Thread(target=self._read, args=(answered,), daemon=True)
        self._reader.start()

    def ask(self, choices: Choices) -> int:
        """Ask a question; returns its number."""
        with self._newest.get_lock():
            self._newest.value += 1
            number = int(self._newest.value)
        self._connection.send((number, choices))
        self._stop_outdated()
        return number

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        self._process.terminate()
        self._process.join(5)
        if threading.current_thread() is not self._reader:  # it may be at a message, and ends with the process
            self._reader.join(5)
        self._connection.close()

    def _stop_outdated(self) -> None:
        pid = self._process.pid
        if self._ready and hasattr(signal, "SIGUSR1") and pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    def _read(self, answered: Answered) -> None:
        while True:
            try:
                number, kind, document = self._connection.recv()
            except (EOFError, OSError):
                return
            self._ready = True  # its handler of the signal is in place
            answered(number, kind, document)


def _serve(inquiry: Inquiry, connection: Connection, newest: Synchronized[int]) -> NoReturn:
    answering = _Answering(newest)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, answering.stop_if_outdated)
    while True:
        try:
            number, choices = connection.recv()
        except (EOFError, OSError):
            sys.exit(0)
        while connection.poll():
            number, choices = connection.recv()
        answering.answer(inquiry, number, choices, connection)


class _Answering:
    """The question that is being answered, and whether it may be stopped now."""

    def __init__(self, newest: Synchronized[int]) -> None:
        self._newest = newest
        self._number = 0
        self._stoppable = False

    def stop_if_outdated(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal that a newer question has come."""
        if self._stoppable and self._number < self._newest.value:
            self._stoppable = False
            raise Outdated

    def answer(self, inquiry: Inquiry, number: int, choices: Choices, connection: Connection) -> None:
        """Answer one question, as far as it stays the newest."""
        self._number = number

        def tell(kind: str, document: Document) -> None:
            self._stoppable = False  # half a message must not be sent
            connection.send((number, kind, document))
            self._stoppable = True
            self.stop_if_outdated(0, None)

        try:
            answer(inquiry, choices, tell)
            self._stoppable = False
            connection.send((number, "done", {}))
        except Outdated:
            pass
        except Exception as error:  # the page must not wait for an answer that does not come
            self._stoppable = False
            connection.send((number, "error", {"text": f"{type(error).__name__}: {error}"}))
            traceback.print_exception(error)
        finally:
            self._stoppable = False


ADDRESS = "127.0.0.1"
"""Pages are for this machine alone: what they run is not limited to one user's share of it."""

PAGE = """{% block title %}TITLE: what if{% endblock %}
{% block postamble %}
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
{% raw %}<style>STYLE</style>
<script>THEME</script>{% endraw %}
{% endblock %}
{% block contents %}
{% from macros import embed %}
<button id="theme" type="button" aria-label="light or dark">dark</button>
<h1>TITLE: what if</h1>
<div class="what-if">
<div class="controls">{{ embed(roots.controls) }}</div>
<div>{{ embed(roots.answer) }}
<div class="charts">
PLACES
</div>
<details><summary>The scenario, as YAML</summary>{{ embed(roots.scenario) }}</details>
</div>
</div>
{% endblock %}
"""

LAYOUT = """
.what-if { display: grid; grid-template-columns: minmax(14rem, 18rem) minmax(0, 1fr); gap: 1rem }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)) }
@media (max-width: 50rem) { .what-if { grid-template-columns: minmax(0, 1fr) } }
"""


class Session:
    """One open page: its choices, its widgets and its worker."""

    def __init__(self, charts: Charts, inquiry: Inquiry, query: dict[str, str]) -> None:
        self._charts = charts
        self._inquiry = inquiry
        choices = inquiry.choices(query)
        self._asked = 0
        self._closed = False
        self._loop = IOLoop.current()
        self._view = View(inquiry.knobs, choices, self._ask)
        for name, root in self._view.roots.items():
            root.name = name
            charts.add_root(root)
        self._worker = Worker(inquiry, self._answered)
        charts.js_on_event(DocumentReady, CustomJS(code="for (const each of Bokeh.documents) paintCharts(each)"))
        charts.js_on_event(DocumentReady, self._view.titled)
        charts.on_session_destroyed(self._close)
        self._ask(choices)

    def _ask(self, choices: Choices) -> None:
        """Choices have changed: show their scenario and link, and ask the worker."""
        link = self._inquiry.link(choices)
        self._view.begin(
            scenario_text(self._inquiry, choices), urlencode(link), title_of(self._inquiry.spec.name, link)
        )
        self._asked = self._worker.ask(choices)

    def _answered(self, number: int, kind: str, document: Document) -> None:
        self._loop.add_callback(self._deliver, number, kind, document)  # it may come before `_asked` is known

    def _deliver(self, number: int, kind: str, document: Document) -> None:
        if not self._closed:
            self._charts.add_next_tick_callback(functools.partial(self._show, number, kind, document))

    def _show(self, number: int, kind: str, document: Document) -> None:
        if number == self._asked:
            self._view.show(kind, document)

    def _close(self, context: Any) -> None:
        self._closed = True
        self._worker.close()


def title_of(name: str, changes: dict[str, str]) -> str:
    """The title of a page: the scenario's name, and what is other than in the scenario."""
    changed = ", ".join(f"{knob} {value}" for knob, value in changes.items())
    return f"{name}: what if {changed}?" if changed else f"{name}: what if"


def scenario_text(inquiry: Inquiry, choices: Choices) -> str:
    """The scenario under these choices as YAML, or the reason why there is none."""
    try:
        document = inquiry.changed(choices)
        settings = inquiry.settings(choices)
    except BadInput as error:
        return f"# {error}\n"
    changed = ", ".join(f"{key}={value}" for key, value in settings.items()) or "nothing"
    head = f"# {inquiry.path.name} with changed fields: {changed}\n"
    return head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110)


def make_server(inquiry: Inquiry, port: int) -> Server:
    """A server of what-if pages on this machine alone, not started yet; port 0 takes a free one."""
    template = _template(inquiry.spec.name)
    port = port or _free_port()

    def open_page(charts: Charts) -> None:
        charts.template = template
        charts.title = f"{inquiry.spec.name}: what if"
        context = charts.session_context
        arguments = context.request.arguments if context is not None and context.request is not None else {}
        Session(charts, inquiry, {name: values[0].decode() for name, values in arguments.items() if values})

    handler = FunctionHandler(open_page)
    handler.process_request = require_text
    return Server(
        {"/": Application(handler)},
        port=port,
        address=ADDRESS,
        allow_websocket_origin=[f"{name}:{port}" for name in (ADDRESS, "localhost")],
        check_unused_sessions_milliseconds=1000,
        unused_session_lifetime_milliseconds=3000,
    )


def require_text(request: HTTPServerRequest) -> dict[str, Any]:
    """Refuse values of a link that are no UTF-8. Bokeh calls it before a session begins, and adds its result."""
    for values in request.arguments.values():
        for value in values:
            try:
                value.decode()
            except UnicodeDecodeError:
                raise HTTPError(400) from None
    return {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


def _template(name: str) -> str:
    places = "\n".join(
        f'<div class="chart">{{{{ embed(roots.{place}) }}}}</div>'
        for place in ("ttft", "tpot", "e2e", "timeline", "pareto", "afd")
    )
    text = PAGE.replace("TITLE", escape(name)).replace("PLACES", places)
    return text.replace("STYLE", asset("page.css") + LAYOUT).replace("THEME", asset("theme.js"))
