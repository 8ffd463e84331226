"""Tables and figures of the reproduced Prelude paper: published beside computed, and the disagreements."""

from __future__ import annotations

from typing import Any

from papers.layout import disagreements
from reports.blocks import Document, Report, Table
from reports.layout import Section, milliseconds, percent, render, rows_table, sections, table


def tables(document: Document) -> Report:
    """Tables 5 and 6 beside the fitted engines, judges among chats, shared rubrics, then the disagreements in words."""
    parts: list[Section] = [
        ("Table 5, requests/s: Qwen3-4B, 512 in, 1 out (* fitted)", _sweep(document["sweep"])),
        ("What a request costs each engine, ms, as fitted", _costs(document)),
        ("Table 6: Qwen3-0.6B, 128 in, 32 out, from Table 4 and the TPOT (*)", _decode(document["decode_control"])),
        ("The best printed beside the peak of one H200", _floors(document["floors"])),
        *(
            (f"Judges among chats, {load}", _lifetimes(results))
            for load, results in document["lifetimes"]["loads"].items()
        ),
        ("Shared rubrics in bursts", _steady(document["prefixes"])),
        ("One cold rubric, requests that come at once: prompt tokens computed", _cold(document["prefixes"]["cold"])),
        ("What disagrees", disagreements(document["claims"])),
    ]
    return sections(parts)


def _sweep(fits: list[Document]) -> Table:
    return rows_table(
        "engine | c | printed | predicted | error | any split | of peak",
        "{engine} | {concurrency}{fitted:*} | {published:.1f} | {predicted:.1f} | {error:100 +.1f} %"
        " | {any_share[0]:.0f}-{any_share[1]:.0f} | {of_floor:100 .0f} %",
        [{**row, "engine": fit["engine"]} for fit in fits for row in fit["rows"]],
    )


def _costs(document: Document) -> Table:
    misfits = {fit["engine"]: f"{100 * fit['misfit']:.1f} %" for fit in document["sweep_all_rows"]}
    return rows_table(
        "engine | client | host | step | prompt | least prompt | misfit | all rows fitted | one a step, req/s",
        "{engine} | {client:1e3 .1f} | {host:1e3 .1f} | {overhead:1e3 .1f} | {per_prompt:1e3 .1f}"
        " | {floor_per_prompt:1e3 .1f} | {misfit:100 .1f} % | {all_rows} | {rate:.1f}",
        [
            {**fit, "all_rows": misfits.get(fit["engine"], "-"), "rate": 1 / fit["latency_alone"]}
            for fit in document["sweep"]
        ],
    )


def _decode(predictions: list[Document]) -> Table:
    result = table("engine", "metric", "printed", "host beside", "error", "host holds up", "error")
    by_engine = {(prediction["engine"], prediction["held"]): prediction["rows"] for prediction in predictions}
    for engine in dict.fromkeys(prediction["engine"] for prediction in predictions):
        for overlapping, blocking in zip(by_engine[engine, False], by_engine[engine, True], strict=True):
            write = "{:.1f}".format if overlapping["metric"] == "rate" else milliseconds
            result.add_row(
                engine,
                _metric(overlapping["metric"]) + ("*" if overlapping["fitted"] else ""),
                write(overlapping["published"]),
                write(overlapping["predicted"]),
                percent(overlapping["error"]),
                write(blocking["predicted"]),
                percent(blocking["error"]),
            )
    return result


def _floors(rows: list[Document]) -> Table:
    return rows_table(
        "engine | TTFT ms, 0.6B | least | times | req/s, 4B | most | share",
        "{engine} | {ttft:1e3 .1f} | {ttft_floor:1e3 .2f} | {times:.0f} | {best_rate:.1f} | {rate_ceiling:.1f}"
        " | {share:100 .0f} %",
        [
            {**row, "times": row["ttft"] / row["ttft_floor"], "share": row["best_rate"] / row["rate_ceiling"]}
            for row in rows
        ],
    )


def _lifetimes(load: Document) -> Table:
    return rows_table(
        "engine | judges' blocks | peak | slots | all blocks | chat TTFT ms | judge TTFT ms | TPOT ms | tok/s",
        "{variant} | {intervals[judge_blocks_held]:±.1f} | {mean[judge_blocks_peak]:.0f} | {mean[judge_slots]:.2f}"
        " | {mean[kv_blocks_held]:.0f}/{mean[kv_blocks]:.0f} | {intervals[chat_ttft.mean]:1e3 ±.0f}"
        " | {intervals[judge_ttft.mean]:1e3 ±.0f} | {intervals[chat_tpot.mean]:1e3 ±.1f}"
        " | {intervals[chat_tokens_per_second]:±.1f}",
        load["variants"],
    )


def _steady(prefixes: Document) -> Table:
    return rows_table(
        "engine | tokens computed | spared | TTFT ms | P95 ms | req/s",
        "{variant} | {mean[computed_tokens]:.0f} | {mean[cached_tokens]:.0f} | {intervals[ttft.mean]:1e3 ±.1f}"
        " | {intervals[ttft.p95]:1e3 ±.1f} | {mean[requests_per_second]:.1f}",
        prefixes["steady"],
    )


def _cold(jobs: list[Document]) -> Table:
    names = list(jobs[0]["runs"])
    runs = (f"{{runs[{name}][computed_tokens]}} ({{runs[{name}][ttft][mean]:1e3 .1f}} ms)" for name in names)
    return rows_table(
        " | ".join(["peers", "expected led", "not led", *names]),
        " | ".join(["{peers}", "{expected[led]}", "{expected[not led]}", *runs]),
        jobs,
    )


def _metric(name: str) -> str:
    return "req/s" if name == "rate" else f"{name.upper()} ms"


# -- figures -----------------------------------------------------------------------------------------------------------


COLOURS = {"prelude": "#1f5fa8", "vllm": "#d1762b", "sglang": "#2a8c5a"}
SIZE = (7.2, 4.2)
"""Width and height of a figure, inches."""


def figures(document: Document) -> dict[str, str]:
    return {
        "sweep": render(_draw_sweep, document, size=SIZE),
        "lifetimes": render(_draw_lifetimes, document, size=SIZE),
    }


def _draw_sweep(panels: list[Any], document: Document) -> None:
    """Table 5: printed and predicted requests/s, the range that the fit leaves open, and the peak of the device."""
    (axes,) = panels
    for fit in document["sweep"]:
        colour, rows = COLOURS[fit["engine"]], fit["rows"]
        at = [row["concurrency"] for row in rows]
        low, high = zip(*(row["any_share"] for row in rows), strict=True)
        axes.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.plot(
            at, [row["predicted"] for row in rows], "-", color=colour, lw=1.2, label=f"{fit['engine']}, predicted"
        )
        for fitted, face in ((True, colour), (False, "white")):
            subset = [row for row in rows if row["fitted"] == fitted]
            axes.plot(
                [row["concurrency"] for row in subset], [row["published"] for row in subset], "o", color=colour,
                mfc=face, ms=5, label=f"{fit['engine']}, printed{', fitted' if fitted else ''}",
            )  # fmt: skip
    peak = document["floors"][0]["rate_ceiling"]
    axes.axhline(peak, color="black", ls=":", lw=1, label=f"one H200 at its peak, {peak:.0f}")
    axes.set_xscale("log", base=2)
    ticks = [row["concurrency"] for row in document["sweep"][0]["rows"]]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(ylim=(0, None), xlabel="concurrency", ylabel="requests/s")
    axes.set_title("Prelude, Table 5: Qwen3-4B, 512 tokens in, 1 out", loc="left", fontsize=10)
    axes.legend(fontsize=7, frameon=False, ncols=2)


def _draw_lifetimes(panels: list[Any], document: Document) -> None:
    """Mean TTFT of judges and chats below capacity, with 95 % intervals."""
    (axes,) = panels
    variants = document["lifetimes"]["loads"]["open"]["variants"]
    for offset, (who, colour) in enumerate((("judge", COLOURS["prelude"]), ("chat", COLOURS["vllm"]))):
        bounds = [row["intervals"][f"{who}_ttft.mean"] for row in variants]
        middle = [(low + high) / 2 for low, high in bounds]
        reach = [(high - low) / 2 for low, high in bounds]
        places = [index + 0.36 * (offset - 0.5) for index in range(len(variants))]
        axes.barh(places, middle, 0.34, xerr=reach, color=colour, alpha=0.8, ecolor="#333", capsize=2, label=f"{who}s")
    axes.set_yticks(range(len(variants)), [row["variant"] for row in variants])
    axes.invert_yaxis()
    axes.set_xlabel("mean TTFT, seconds, with 95 % interval")
    axes.set_title("Judges among chats, below capacity (simulated)", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
