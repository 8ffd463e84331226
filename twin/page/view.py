"""Widgets of a what-if page: its sliders, its charts, the answer in words, and the scenario as YAML."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from bokeh.layouts import column
from bokeh.models import (
    Button,
    ColumnDataSource,
    CustomJS,
    Div,
    HoverTool,
    InlineStyleSheet,
    Select,
    Slider,
    TextAreaInput,
    UIElement,
    Widget,
)  # fmt: skip
from bokeh.plotting import figure as Figure

from reports.blocks import Column
from reports.fields import POINTS as MEANINGS
from reports.pages.charts import canvas, legend, plain_ticks
from reports.pages.html import html_cell, html_table
from reports.pages.theme import GOAL, PREDICTED, SERIES, WAITING, WIDGETS
from reports.serving.sentences import LATENCIES, POINTS, headline, warnings
from twin.page.knobs import Choices, Knob

Document = dict[str, Any]
Changed = Callable[[Choices], None]

TITLED = """
history.replaceState(null, '', '?' + link.tags[0])
document.title = link.tags[1]
document.querySelector('h1').textContent = link.tags[1]
"""
"""Script that shows a question's link and title."""

NOTHING: dict[str, list[float]] = {"x": [], "y": []}
ANSWER = """
:host { font-size: 13px } .bk-clearfix { max-width: 100% } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: 2px 9px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
"""
"""Style of the answer, whose shadow root the page's own does not reach."""

CURVES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}


class View:
    """The widgets and charts of one open page.

    Args:
        choices: shown at first. changed: called with all choices when one is changed.

    Attributes:
        roots: by the name of their place in the page.
    """

    def __init__(self, knobs: list[Knob], choices: Choices, changed: Changed) -> None:
        self._knobs, self._choices, self._changed = knobs, dict(choices), changed
        sheet = InlineStyleSheet(css=WIDGETS)
        self.widgets = {knob.name: self._widget(knob, sheet) for knob in knobs}
        self.answer = Div(
            text="<p>simulating …</p>", sizing_mode="stretch_width", stylesheets=[sheet], styles={"min-width": "0"}
        )
        self.status = Div(text="", sizing_mode="stretch_width", stylesheets=[sheet], name="status")
        self.yaml = TextAreaInput(value="", rows=18, sizing_mode="stretch_width", stylesheets=[sheet],
                                  title="The scenario", max_length=None)  # fmt: skip
        self.link = Div(text="", tags=[""], stylesheets=[sheet], visible=False)
        self.titled = CustomJS(args={"link": self.link}, code=TITLED)
        self.link.js_on_change("tags", self.titled)
        self._latency, self._goals, latencies = self._latency_charts()
        self._time, timeline = _timeline()
        self._pareto, self._here, pareto = _pareto_chart(knobs)
        self._afd, self._star, afd = _afd_chart()
        self.afd_note = Div(text="", sizing_mode="stretch_width", stylesheets=[sheet])
        self.pareto_note = Div(text="", sizing_mode="stretch_width", stylesheets=[sheet])
        self.roots: dict[str, UIElement] = {
            "controls": column(*self.widgets.values(), self._write_button(sheet), sizing_mode="stretch_width"),
            "answer": column(self.status, self.answer, self.link, sizing_mode="stretch_width"),
            **{name: chart for name, chart in latencies.items()},
            "timeline": timeline,
            "pareto": column(pareto, self.pareto_note, sizing_mode="stretch_width"),
            "afd": column(afd, self.afd_note, sizing_mode="stretch_width"),
            "scenario": self.yaml,
        }
        self._fresh: set[str] = set()
        self._reasons: dict[str, str] = {}

    def show(self, kind: str, document: Document) -> None:
        """Show an answer: `draft`, `full`, `pareto`, `afd` or `error`."""
        match kind:
            case "draft" | "full":
                self._show_run(document, draft=kind == "draft")
            case "pareto":
                self._show_point(document)
            case "afd":
                self._show_afd(document)
            case "error":
                self._clear()
                self.status.text = f'<p class="warning"><b>{escape(document["text"])}</b></p>'

    def begin(self, scenario: str, query: str, title: str) -> None:
        """A question has been asked: show its scenario, its link and its title."""
        self.yaml.value, self.link.tags = scenario, [query, title]
        self._fresh, self._reasons = set(), {}

    def _clear(self) -> None:
        """Remove the numbers and curves of an earlier question."""
        self.answer.text = self.afd_note.text = self.pareto_note.text = ""
        for source in (*self._latency.values(), *self._time.values(), *self._afd.values(), self._here):
            source.data = dict(NOTHING)
        for source in self._pareto.values():
            source.data = {**NOTHING, "rate": []}
        for source in (*self._goals.values(), self._star):
            source.data = {"x": []}

    def _widget(self, knob: Knob, sheet: InlineStyleSheet) -> Widget:
        value = self._choices[knob.name]
        shared: dict[str, Any] = {"title": knob.label, "stylesheets": [sheet], "sizing_mode": "stretch_width",
                                  "name": knob.name}  # fmt: skip
        widget: Select | Slider
        if knob.options:
            widget = Select(value=value, options=list(knob.options), description=knob.help or None, **shared)
        else:
            number = float(value)
            digits = "0,0" if knob.step == int(knob.step) else "0,0.[0000]"
            widget = Slider(start=knob.low, end=max(knob.high, number), value=number, step=knob.step, format=digits,
                            **shared)  # fmt: skip

        def change(attribute: str, old: object, new: Any) -> None:
            choice = new if knob.options else knob.whole(float(new))
            if choice != self._choices[knob.name]:
                self._choices[knob.name] = choice
                self._changed(dict(self._choices))

        widget.on_change("value", change)
        return widget

    def _write_button(self, sheet: InlineStyleSheet) -> Button:
        button = Button(label="write the scenario", stylesheets=[sheet], name="write")
        button.js_on_click(
            CustomJS(
                args={"yaml": self.yaml},
                code="""
                const link = document.createElement("a")
                link.href = URL.createObjectURL(new Blob([yaml.value], {type: "text/yaml"}))
                link.download = (/^name: (\\S+)$/m.exec(yaml.value) ?? ["", "scenario"])[1] + ".yaml"
                link.click()
                URL.revokeObjectURL(link.href)
                """,
            )
        )
        return button

    def _latency_charts(
        self,
    ) -> tuple[dict[str, ColumnDataSource], dict[str, ColumnDataSource], dict[str, UIElement]]:
        sources, goals, charts = {}, {}, {}
        for name, label in CURVES.items():
            chart = canvas(label, height=240, y_range=(0, 101))
            chart.xaxis.axis_label, chart.yaxis.axis_label = f"{label}, s", "share of requests, %"
            sources[name], goals[name] = ColumnDataSource(dict(NOTHING)), ColumnDataSource({"x": []})
            line = chart.line("x", "y", source=sources[name], line_color=PREDICTED, line_width=2)
            chart.vspan(x="x", source=goals[name], line_color=GOAL, line_dash="dotted", line_width=2)
            _hover(chart, line, [(label, "@x{0.[0000]} s"), ("share", "@y{0.} %")])
            plain_ticks(chart)
            charts[name] = chart
        return sources, goals, charts

    def _show_run(self, document: Document, *, draft: bool) -> None:
        series, summary = document["series"], document["summary"]
        slo = document["scenario"]["measure"]["slo"]
        for name, source in self._latency.items():
            values = series["quantiles"][name]
            source.data = {"x": values or [], "y": [100 * p for p in series["quantiles"]["p"]] if values else []}
            self._goals[name].data = {"x": [slo[name]] if name in slo else []}
        for name, source in self._time.items():
            source.data = {"x": series["time"], "y": series[name]}
        what = "a draft of" if draft else "all"
        self.status.text = f"<p>{what} {summary['requests']:,} requests{' …' if draft else ''}</p>"
        self.answer.text = answer_text(document)

    def _show_point(self, point: Document) -> None:
        name = point["name"]
        source = self._pareto.get(name)
        if point.get("reason"):
            self._reasons.setdefault(name, point["reason"])
        if source is None:
            return
        data = {"x": [], "y": [], "rate": []} if name not in self._fresh else dict(source.data)
        self._fresh.add(name)
        if point["user"] is not None and point["gpu"] is not None:
            new = {"x": point["user"], "y": point["gpu"], "rate": point["rate"]}
            data = _with_point(data, new)
            if point["load"] == 1.0 and len(self._fresh) == 1:  # the split that is chosen is the first
                self._here.data = {"x": [new["x"]], "y": [new["y"]]}
        source.data = data
        notes = "; ".join(f"{split}: {reason}" for split, reason in self._reasons.items())
        self.pareto_note.text = f"<p>{escape(notes)}</p>" if notes else ""

    def _show_afd(self, bundle: Document) -> None:
        if bundle.get("reason"):
            for source in self._afd.values():
                source.data = dict(NOTHING)
            self._star.data = {"x": []}
            self.afd_note.text = f"<p>{escape(bundle['reason'])}</p>"
            return
        curves, theory, cards = bundle["curves"], bundle["theory"], bundle["cards"]
        for name, source in self._afd.items():
            source.data = {"x": curves["ratio"], "y": curves[name]}
        self._star.data = {"x": [theory["r_star_per_card"]]}
        published, best = theory["r_star_per_card"], theory["r_star_barrier_per_card"]
        self.afd_note.text = (
            f"<p>Best by GPUs: r* = {published:.2f} ({theory['regime_per_card'].replace('-', ' ')}), with barrier and "
            f"pipeline {best:.2f}; {cards['attention']} GPUs an attention and {cards['ffn']} an FFN instance. Closed "
            "forms.</p>"
        )


def _with_point(data: dict[str, list[float]], new: dict[str, float]) -> dict[str, list[float]]:
    """Columns with a point more, in the order of load."""
    rows = [*zip(data["rate"], data["x"], data["y"], strict=True), (new["rate"], new["x"], new["y"])]
    rows.sort()
    return {key: [row[index] for row in rows] for index, key in enumerate(("rate", "x", "y"))}


def answer_text(document: Document) -> str:
    """The answer of a run as HTML: a sentence, warnings, and a table of latencies with goals."""
    summary, slo = document["summary"], document["scenario"]["measure"]["slo"]
    rows = []
    for name, label in LATENCIES.items():
        if summary[name] is None:
            continue
        goal = slo.get(name)
        mark = "" if goal is None else f"{goal:g} {'✓' if summary[name]['p99'] <= goal else '✗'}"
        rows.append([label, *(html_cell(summary[name][point]) for point in POINTS), mark])
    columns = [Column("seconds"), *(Column(point, help=MEANINGS[point][1]) for point in POINTS),
               Column("goal (P99)", help="Of each request")]  # fmt: skip
    facts = {
        "GPUs": (document["devices"] or {}).get("total"),
        "output tokens/s/GPU": summary.get("output_throughput_per_device"),
        "share in SLO": summary.get("goodput_share"),
        "KV in use": summary["kv_used"],
        "load": summary["load"],
    }
    line = ", ".join(f"{name} {html_cell(value)}" for name, value in facts.items() if value is not None)
    alerts = "".join(f'<p style="color: #e0566b"><b>{escape(text)}</b></p>' for text in warnings(document))
    style = f"<style>{ANSWER}</style>"
    sentence = f"<p><b>{escape(headline(document))}</b></p>"
    return f"{style}{sentence}{alerts}<p>{escape(line)}</p>{html_table(columns, rows)}"


def _hover(chart: Figure, renderer: Any, tips: list[tuple[str, str]], mode: Any = "vline") -> None:
    chart.add_tools(HoverTool(renderers=[renderer], tooltips=tips, mode=mode, visible=False))


def _timeline() -> tuple[dict[str, ColumnDataSource], UIElement]:
    chart = canvas("Who ran and who waited", height=240)
    chart.xaxis.axis_label, chart.yaxis.axis_label = "time, s", "requests"
    chart.y_range.start = 0
    sources, glyphs = {}, {}
    for name, colour in (("running", PREDICTED), ("waiting", WAITING)):
        sources[name] = ColumnDataSource(dict(NOTHING))
        line = chart.line("x", "y", source=sources[name], line_color=colour, line_width=1.6)
        _hover(chart, line, [("time", "@x{0.[0]} s"), (name, "@y")])
        glyphs[name] = [line]
    legend(chart, glyphs)
    return sources, chart


def _pareto_chart(knobs: list[Knob]) -> tuple[dict[str, ColumnDataSource], ColumnDataSource, UIElement]:
    chart = canvas("Throughput against interactivity", height=300)
    chart.xaxis.axis_label, chart.yaxis.axis_label = "tokens/s of a user (1 / mean TPOT)", "output tokens/s of a GPU"
    degrees = next((knob.options for knob in knobs if knob.name == "tp"), ())
    names = [f"TP {degree}" for degree in degrees] or ["as chosen"]
    sources: dict[str, ColumnDataSource] = {}
    glyphs: dict[str, list[Any]] = {}
    for name, colour in zip(names, SERIES[1:], strict=False):
        sources[name] = ColumnDataSource({"x": [], "y": [], "rate": []})
        line = chart.line("x", "y", source=sources[name], line_color=colour, line_width=1.6)
        points = chart.scatter("x", "y", source=sources[name], color=colour, size=6)
        tips = [("", name), ("load", "@rate{0.[00]}"), ("a user's tokens/s", "@x{0.[0]}"), ("a GPU's", "@y{0.[0]}")]
        _hover(chart, points, tips, "mouse")
        glyphs[name] = [line, points]
    star_source = ColumnDataSource(dict(NOTHING))
    glyphs["as chosen"] = [chart.scatter("x", "y", source=star_source, marker="star", size=16, color=PREDICTED)]
    legend(chart, glyphs)
    return sources, star_source, chart


def _afd_chart() -> tuple[dict[str, ColumnDataSource], ColumnDataSource, UIElement]:
    chart = canvas("Attention and FFN apart (AFD)", height=300, x_axis_type="log")
    chart.xaxis.axis_label = "attention instances per FFN instance, r"
    chart.yaxis.axis_label = "output tokens/s of a GPU"
    chart.y_range.start = 0
    sources: dict[str, ColumnDataSource] = {}
    glyphs: dict[str, list[Any]] = {}
    labels = {"theory": "as published (eq. 6)", "barrier": "with barrier and pipeline"}
    for (name, label), colour, dash in zip(labels.items(), SERIES[1:], ("dashed", "solid"), strict=False):
        sources[name] = ColumnDataSource(dict(NOTHING))
        line = chart.line("x", "y", source=sources[name], line_color=colour, line_width=2, line_dash=dash)
        _hover(chart, line, [("r", "@x{0.[00]}"), (label, "@y{0.[0]}")])
        glyphs[label] = [line]
    star = ColumnDataSource({"x": []})
    glyphs["r*"] = [chart.vspan(x="x", source=star, line_color=GOAL, line_dash="dotted", line_width=2)]
    legend(chart, glyphs)
    plain_ticks(chart)
    chart.xaxis.ticker = [0.5, 1, 2, 4, 8, 16, 32]
    return sources, star, chart
