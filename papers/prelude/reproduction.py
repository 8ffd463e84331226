"""Prelude: execution classes and prefix-led planning by simulation, and the printed tables beside a fitted model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from papers.common import Claim, Task, claim, disagreements, run_tasks
from papers.prelude import lifetimes, prefixes
from papers.prelude.engines import ENGINES, arithmetic, decode_tasks, floors, one_shot_rows, sweep_rows, sweep_tasks
from reports.blocks import Document, Report, Section, Table, milliseconds, percent, rows_table, sections, table
from reports.blocks import milliseconds as ms
from reports.svg import render

SCHEMA = "twin.reproduction-prelude/1"

Parts = dict[str, list[Task]]


def all_parts() -> Parts:
    """The tasks of every part of the document, the longest first: about 90 seconds of one core."""
    return {
        "sweep_all_rows": sweep_tasks(tuple(row.concurrency for row in sweep_rows())),
        "sweep": sweep_tasks(),
        "decode_control": decode_tasks(),
        "lifetimes": lifetimes.tasks(),
        "prefixes": prefixes.tasks(),
    }


def reproduce(jobs: int, progress: Callable[[str], None], parts: Parts | None = None) -> dict[str, Any]:
    """The document `twin.reproduction-prelude/1`: predictions beside published values; `parts`: fewer, for a trial."""
    parts = all_parts() if parts is None else parts
    results = iter(run_tasks([task for tasks in parts.values() for task in tasks], jobs, progress))
    results_by_part = {part: [next(results) for _ in tasks] for part, tasks in parts.items()}
    runs = {
        part: dict(zip((task.arguments for task in parts[part]), results_by_part[part], strict=True))
        for part in ("lifetimes", "prefixes")
    }
    document = {
        "schema": SCHEMA,
        "paper": "prelude",
        "simulated": True,
        "arithmetic": arithmetic(),
        "floors": floors(one_shot_rows(), sweep_rows()),
        "sweep": results_by_part["sweep"],
        "sweep_all_rows": results_by_part["sweep_all_rows"],
        "decode_control": results_by_part["decode_control"],
        "lifetimes": lifetimes.summarise_lifetimes(runs["lifetimes"]),
        "prefixes": prefixes.summarise_prefixes(runs["prefixes"]),
    }
    document["claims"] = claims(document)
    return document


def claims(document: dict[str, Any]) -> list[Claim]:
    return [
        *_sweep_claims(document),
        *_decode_claims(document),
        *_table_claims(document["arithmetic"]),
        *_lifetime_claims(document["lifetimes"]),
        *_prefix_claims(document["prefixes"]),
    ]


def _sweep_claims(document: dict[str, Any]) -> list[Claim]:
    fits = {fit["engine"]: fit for fit in document["sweep"]}
    rates = {engine: [row["predicted"] for row in fit["rows"]] for engine, fit in fits.items()}
    ahead = [rate > max(rivals) for rate, *rivals in zip(rates["prelude"], rates["vllm"], rates["sglang"], strict=True)]
    switched = [row["switched"] / row["predicted"] - 1 for row in fits["prelude"]["rows"]]
    rows = [
        claim("Table 5", "Prelude leads at every concurrency", "6 of 6", f"{sum(ahead)} of {len(ahead)}", all(ahead),
               "predicted from the fits, not from the rows themselves"),
        claim("Table 5", "without the class Prelude would answer fewer", "fewer",
               f"{100 * min(switched):+.1f} to {100 * max(switched):+.1f} %", max(switched) < 0,
               "Prelude's costs in an engine without the class: where no chats compete, it changes no schedule. What"
               " sets the engines apart is what requests cost them, in milliseconds fixed and for each prompt: "
               + "; ".join(f"{engine} {ms(fit['overhead'] + fit['host'])} and {ms(fit['per_prompt'])}"
                           for engine, fit in fits.items())),
    ]  # fmt: skip
    for fit in document["sweep"]:
        for row in fit["rows"]:
            low, high = row["any_share"]
            if not row["fitted"]:
                rows.append(
                    claim("Table 5", f"{fit['engine']} at c = {row['concurrency']}", f"{row['published']:.1f} req/s",
                           f"{low:.1f} to {high:.1f}", low <= row["published"] <= high,
                           f"whatever part of the fixed time holds the engine up; the best fit gives"
                           f" {row['predicted']:.1f} ({100 * row['error']:+.1f} %)")
                )  # fmt: skip
    return rows


def _decode_claims(document: dict[str, Any]) -> list[Claim]:
    by_engine = {
        (task["engine"], task["held"]): {row["metric"]: row for row in task["rows"]}
        for task in document["decode_control"]
    }
    rows = []
    for engine in ENGINES:
        overlapping, blocking = by_engine[engine, False]["ttft"], by_engine[engine, True]["ttft"]
        low, high = sorted([overlapping["predicted"], blocking["predicted"]])
        published = overlapping["published"]
        rows.append(
            claim("Table 6", f"{engine}: TTFT at c = 4", f"{ms(published)} ms", f"{ms(low)} to {ms(high)} ms",
                   low <= published <= high,
                   "from Table 4, where the host's time passes beside others' work, and where it holds the engine up")
        )  # fmt: skip
    rates = {key: metrics["rate"] for key, metrics in by_engine.items()}
    ratios = sorted(
        rates["prelude", blocks]["predicted"] / rates["vllm", blocks]["predicted"] for blocks in (False, True)
    )
    published = rates["prelude", False]["published"] / rates["vllm", False]["published"]
    rows.append(
        claim("Table 6", "throughput over vLLM's at 32 output tokens", f"{published:.2f}",
               f"{ratios[0]:.2f} to {ratios[1]:.2f}", ratios[0] <= published <= ratios[1], "the same two readings")
    )  # fmt: skip
    return rows


def _table_claims(rows: list[dict[str, Any]]) -> list[Claim]:
    result = []
    for row in rows:
        engine, cycle, median = row["engine"], row["cycle_4b"], row["p50_4b"]
        result.append(
            claim("section 4", f"{engine}: a lone client's P50 fits into its cycle", f"P50 {ms(median)} ms",
                   f"1/throughput {ms(cycle)} ms", median <= cycle,
                   "" if median <= cycle else "possible only if the faster half of the requests took at most"
                   f" {ms(row['faster_half'])} ms in the mean")
        )  # fmt: skip
        result.append(
            claim("Tables 4, 6", f"{engine}: the client is as quick with 4 requests as with one",
                   f"{ms(row['client_one_shot'])} ms", f"{ms(row['client_decode'])} ms",
                   row["client_decode"] <= row["client_one_shot"],
                   "between an answer and the next request, c / throughput - E2E: the load generator is part of what"
                   " was measured")
        )  # fmt: skip
        result.append(
            claim("Tables 2, 4", f"{engine}: 0.6B with 128 tokens is no slower than 4B with 512",
                   f"TTFT {ms(row['ttft_06b'])} ms", f"P50 {ms(median)} ms", row["ttft_06b"] <= median,
                   "both with one client" if row["ttft_06b"] <= median else
                   "no set of fixed costs can give both: the two benchmarks did not meet the same engine")
        )  # fmt: skip
    return result


def _lifetime_claims(summary: dict[str, Any]) -> list[Claim]:
    calm, full = summary["loads"]["open"], summary["loads"]["saturated"]
    by_name = {row["variant"]: row["mean"] for row in calm["variants"]}
    one_shot, shaped = by_name["one-shot"], by_name["decode-shaped"]
    reserved = by_name["one-shot, answers reserved"]
    means = {row["variant"]: row["mean"] for row in full["variants"]}
    block_shares = {name: mean["judge_blocks_held"] / one_shot["kv_blocks"] for name, mean in means.items()}
    before = {name: mean["chat_tokens_per_second"] for name, mean in means.items()}
    gained = {row["to"]: row["intervals"] for row in full["differences"]}
    return [
        claim("Table 1", "one-shot work keeps no seat", "none",
               f"{one_shot['judge_slots']:.2f} of {shaped['judge_slots']:.2f}", one_shot["judge_slots"] == 0,
               "slots that judges hold on average, with and without the class"),
        claim("Table 1", "and no KV", "none after one forward",
               f"{one_shot['judge_blocks_held']:.2f} of {shaped['judge_blocks_held']:.2f} blocks",
               one_shot["judge_blocks_held"] < shaped["judge_blocks_held"],
               f"in the mean, of {one_shot['kv_blocks']:.0f}; only a prompt that no step holds whole would be cut and"
               " take some"),
        *(
            claim("section 3", f"the class gives chats more throughput than {variant}", "more tokens/s",
                   f"{100 * low / before[variant]:+.2f} to {100 * high / before[variant]:+.2f} %", low > 0,
                   f"at saturation, 95 % of the difference; chat TPOT {1e3 * tpot[0]:+.1f} to {1e3 * tpot[1]:+.1f} ms."
                   f" Without the class judges hold {100 * block_shares[variant]:.1f} % of the blocks: each stays for a"
                   " step")
            for variant, intervals in gained.items()
            for (low, high), tpot in [(intervals["chat_tokens_per_second"], intervals["chat_tpot.mean"])]
        ),
        *(
            claim("section 3", f"judges answer sooner than {row['to']}", "sooner",
                   f"{1e3 * low:+.0f} to {1e3 * high:+.0f} ms", high < 0,
                   "below capacity, 95 % of the difference of mean TTFT; chats' own changes by"
                   f" {1e3 * chat[0]:+.0f} to {1e3 * chat[1]:+.0f} ms")
            for row in calm["differences"]
            for (low, high), chat in [(row["intervals"]["judge_ttft.mean"], row["intervals"]["chat_ttft.mean"])]
        ),
        claim("section 3", "reserving whole answers costs chats", "TTFT grows",
               f"{1e3 * one_shot['chat_ttft']['mean']:.0f} to {1e3 * reserved['chat_ttft']['mean']:.0f} ms",
               reserved["chat_ttft"]["mean"] > one_shot["chat_ttft"]["mean"],
               "with the class in both: it is the chats' own reservations that fill the memory"),
    ]  # fmt: skip


def _prefix_claims(summary: dict[str, Any]) -> list[Claim]:
    exact = all(job["expected"][name] == job["runs"][name]["computed_tokens"]
                for job in summary["cold"] for name in job["expected"])  # fmt: skip
    saved = [
        job["runs"]["not led"]["computed_tokens"] / job["runs"]["led"]["computed_tokens"] for job in summary["cold"]
    ]
    sooner = [job["runs"]["led"]["ttft"]["mean"] < job["runs"]["not led"]["ttft"]["mean"] for job in summary["cold"]]
    over = {row["variant"]: row for row in summary["led_over"]}
    tokens, ttft = (over["not led"]["intervals"][name] for name in ("computed_tokens", "ttft.mean"))
    within = over["shared within a step"]["mean"]
    peers = ", ".join(str(job["peers"]) for job in summary["cold"])
    return [
        claim("section 3", f"a cold rubric is computed once, {peers} peers", "once",
               ", ".join(f"{factor:.1f}" for factor in saved) + " times fewer tokens", exact,
               "simulated counts are those of the closed form, token for token"),
        claim("section 3", "waiting a step is cheaper than computing it again", "cheaper",
               f"TTFT is shorter in {sum(sooner)} of {len(sooner)}", all(sooner), "jobs of these sizes, in the mean"),
        claim("section 3", "steady bursts against 64 rubrics: tokens computed", "fewer",
               f"{100 * (tokens[0] - 1):+.1f} to {100 * (tokens[1] - 1):+.1f} %", tokens[1] < 1,
               f"mean TTFT {100 * (ttft[0] - 1):+.1f} to {100 * (ttft[1] - 1):+.1f} %; against an engine that shares"
               f" blocks within a step {100 * (within['ttft.mean'] - 1):+.1f} %"),
    ]  # fmt: skip


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
