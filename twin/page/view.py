"""Widgets of a what-if page: its sliders, its charts, the answer in words, and the scenario as YAML."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from math import nan
from typing import Any

from bokeh.layouts import column
from bokeh.models import (
    Button,
    ColumnDataSource,
    CustomJS,
    Div,
    InlineStyleSheet,
    Select,
    Slider,
    TextAreaInput,
    UIElement,
    Widget,
)  # fmt: skip

from reports.blocks import Chart, Column, Curve, Document
from reports.explorer import bokeh_chart
from reports.fields import POINTS as MEANINGS
from reports.html import html_cell, html_table
from reports.serving_sentences import LATENCIES, POINTS, headline, warnings
from reports.theme import PREDICTED, SERIES, WAITING, asset
from twin.page.questions import Choices, Knob

Changed = Callable[[Choices], None]

TITLED = """
history.replaceState(null, '', '?' + link.tags[0])
document.title = link.tags[1]
document.querySelector('h1').textContent = link.tags[1]
"""
"""Script that shows a question's link and title."""

ANSWER = """
:host { font-size: 13px } .bk-clearfix { max-width: 100% } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: 2px 9px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
"""
"""Style of the answer, whose shadow root the page's own does not reach."""

CURVES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
AFD = {"theory": "as published (eq. 6)", "barrier": "with barrier and pipeline"}
CHOICE = "at this load"


class View:
    """The widgets and charts of one open page, by their places; `changed` is called with all choices."""

    def __init__(self, knobs: list[Knob], choices: Choices, changed: Changed) -> None:
        self._choices = dict(choices)
        self._changed = changed
        sheet = InlineStyleSheet(css=asset("widgets.css"))
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
        self.afd_note = Div(text="", sizing_mode="stretch_width", stylesheets=[sheet])
        self.pareto_note = Div(text="", sizing_mode="stretch_width", stylesheets=[sheet])
        self.charts = {name: LiveChart(chart) for name, chart in _charts(knobs).items()}
        self.charts["afd"].model.xaxis.ticker = [0.5, 1, 2, 4, 8, 16, 32]
        notes: dict[str, list[UIElement]] = {"pareto": [self.pareto_note], "afd": [self.afd_note]}
        self.roots: dict[str, UIElement] = {
            "controls": column(*self.widgets.values(), self._write_button(sheet), sizing_mode="stretch_width"),
            "answer": column(self.status, self.answer, self.link, sizing_mode="stretch_width"),
            **{
                name: column(chart.model, *notes.get(name, ()), sizing_mode="stretch_width")
                for name, chart in self.charts.items()
            },
            "scenario": self.yaml,
        }
        self._points: dict[str, list[tuple[float, float, float]]] = {}
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
        self.yaml.value = scenario
        self.link.tags = [query, title]
        self._points = {}
        self._reasons = {}

    def _clear(self) -> None:
        self.answer.text = self.afd_note.text = self.pareto_note.text = ""
        for chart in self.charts.values():
            chart.clear()

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

    def _show_run(self, document: Document, *, draft: bool) -> None:
        series, summary = document["series"], document["summary"]
        slo = document["scenario"]["measure"]["slo"]
        for name in CURVES:
            values, chart = series["quantiles"][name], self.charts[name]
            shares = [100 * share for share in series["quantiles"]["p"]] if values else []
            chart.curves[""].data = {"x": values or [], "y": shares}
            chart.marks["goal"].data = {"x": [slo[name]] if name in slo else []}
        for name, source in self.charts["timeline"].curves.items():
            source.data = {"x": series["time"], "y": series[name]}
        scope = "a draft of" if draft else "all"
        self.status.text = f"<p>{scope} {summary['requests']:,} requests{' …' if draft else ''}</p>"
        self.answer.text = answer_text(document)

    def _show_point(self, point: Document) -> None:
        name, curves = point["name"], self.charts["pareto"].curves
        if point.get("reason"):
            self._reasons.setdefault(name, point["reason"])
        if name not in curves:
            return
        points = self._points.setdefault(name, [])
        if point["user"] is not None and point["gpu"] is not None:
            points.append((point["rate"], point["user"], point["gpu"]))
            points.sort()
            if point["load"] == 1.0 and len(self._points) == 1:  # the split that is chosen is the first
                curves[CHOICE].data = {"x": [point["user"]], "y": [point["gpu"]]}
        columns = {key: [row[index] for row in points] for index, key in enumerate(("rate", "x", "y"))}
        curves[name].data = {**columns, "name": [f"load {rate:.3g}" for rate in columns["rate"]]}
        notes = "; ".join(f"{split}: {reason}" for split, reason in self._reasons.items())
        self.pareto_note.text = f"<p>{escape(notes)}</p>" if notes else ""

    def _show_afd(self, bundle: Document) -> None:
        chart = self.charts["afd"]
        if bundle.get("reason"):
            chart.clear()
            self.afd_note.text = f"<p>{escape(bundle['reason'])}</p>"
            return
        theory, cards = bundle["theory"], bundle["cards"]
        for name, label in AFD.items():
            chart.curves[label].data = {"x": bundle["curves"]["ratio"], "y": bundle["curves"][name]}
        published, best = theory["r_star_per_card"], theory["r_star_barrier_per_card"]
        chart.marks["r*"].data = {"x": [published]}
        self.afd_note.text = (
            f"<p>Best by GPUs: r* = {published:.2f} ({theory['regime_per_card'].replace('-', ' ')}), with barrier and "
            f"pipeline {best:.2f}; {cards['attention']} GPUs an attention and {cards['ffn']} an FFN instance. Closed "
            "forms.</p>"
        )


class LiveChart:
    """A chart for the page whose curves, by label, and vertical lines come later."""

    def __init__(self, chart: Chart) -> None:
        self.model = bokeh_chart(chart)
        sources = list(dict.fromkeys(renderer.data_source for renderer in self.model.renderers))
        count = len(chart.curves)
        self.curves: dict[str, ColumnDataSource] = {
            curve.label: source for curve, source in zip(chart.curves, sources[:count], strict=True)
        }
        self.marks: dict[str, ColumnDataSource] = dict(zip(chart.marks, sources[count:], strict=True))
        self.clear()

    def clear(self) -> None:
        for source in (*self.curves.values(), *self.marks.values()):
            source.data = {name: [] for name in source.data}


def _charts(knobs: list[Knob]) -> dict[str, Chart]:
    """The charts of a page without their curves' points, by the names of their places."""
    degrees = next((knob.options for knob in knobs if knob.name == "tp"), ())
    splits = [f"TP {degree}" for degree in degrees] or ["as chosen"]
    pareto = [Curve(name, [None], [None], colour, "both", names=[""])
              for name, colour in zip(splits, SERIES[1:], strict=False)]  # fmt: skip
    afd = [Curve(label, (), (), colour, kind)
           for label, colour, kind in zip(AFD.values(), SERIES[1:], ("dashed", "solid"), strict=False)]  # fmt: skip
    states = [Curve("running", (), (), PREDICTED), Curve("waiting", (), (), WAITING)]
    return {
        **{name: Chart(label, [Curve("", (), (), PREDICTED)], f"{label}, s", "share of requests, %", y_range=(0, 101),
                       marks={"goal": nan}, height=240) for name, label in CURVES.items()},
        "timeline": Chart("Who ran and who waited", states, "time, s", "requests", height=240),
        "pareto": Chart("Throughput against interactivity", [*pareto, Curve(CHOICE, (), (), PREDICTED, "points")],
                        "tokens/s of a user (1 / mean TPOT)", "output tokens/s of a GPU", from_zero=False),
        "afd": Chart("Attention and FFN apart (AFD)", afd, "attention instances per FFN instance, r",
                     "output tokens/s of a GPU", log_x=True, marks={"r*": nan}),
    }  # fmt: skip


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
