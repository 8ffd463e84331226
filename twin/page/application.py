"""The server of what-if pages: each open page has its widgets and a process that answers."""

from __future__ import annotations

import functools
import socket
from html import escape
from typing import Any
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

from reports.pages.theme import asset
from twin.page.knobs import Choices, from_link, settings_of
from twin.page.questions import Document, Inquiry
from twin.page.view import View
from twin.page.worker import Worker
from workloads.errors import BadInput

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
        self._knobs = inquiry.knobs
        choices = from_link(self._knobs, query)
        self._asked = 0
        self._closed = False
        self._loop = IOLoop.current()
        self._view = View(self._knobs, choices, self._ask)
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
        settings = settings_of(inquiry.knobs, choices, inquiry.spec)
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
