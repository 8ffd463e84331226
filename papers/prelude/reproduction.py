"""Prelude: execution classes and prefix-led planning by simulation, and the printed tables beside a fitted model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from papers.common import Claim, Task, Wording, conclusion, ends, run_tasks, title
from papers.prelude import lifetimes, prefixes
from papers.prelude.engines import ENGINES, arithmetic, decode_tasks, floors, one_shot_rows, sweep_rows, sweep_tasks
from reports.blocks import Document, Report, Table, rows_table, sections
from reports.svg import render

WORDING = Wording("prelude")
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


def reproduce(jobs: int, progress: Callable[[str], None], parts: Parts | None = None) -> Document:
    """The document `twin.reproduction-prelude/1`: predictions beside published values; `parts`: fewer, for a trial."""
    parts = all_parts() if parts is None else parts
    results = iter(run_tasks([task for tasks in parts.values() for task in tasks], jobs, progress))
    of_part = {part: {task: next(results) for task in tasks} for part, tasks in parts.items()}
    runs = {
        part: {task.arguments: result for task, result in of_part[part].items()} for part in ("lifetimes", "prefixes")
    }
    document = {
        "schema": "twin.reproduction-prelude/1",
        "paper": "prelude",
        "simulated": True,
        "arithmetic": arithmetic(),
        "floors": floors(one_shot_rows(), sweep_rows()),
        **{part: list(of_part[part].values()) for part in ("sweep", "sweep_all_rows", "decode_control")},
        "lifetimes": lifetimes.summarise_lifetimes(runs["lifetimes"]),
        "prefixes": prefixes.summarise_prefixes(runs["prefixes"]),
    }
    return document | {"claims": claims(document)}


def claims(document: Document) -> list[Claim]:
    return [
        *_sweep_claims(document["sweep"]),
        *_decode_claims(document["decode_control"]),
        *(claim for row in document["arithmetic"] for claim in _table_claims(row)),
        *_lifetime_claims(document["lifetimes"]["loads"]),
        *_prefix_claims(document["prefixes"]),
    ]


def _sweep_claims(sweep: list[Document]) -> Iterator[Claim]:
    fits = {fit["engine"]: fit for fit in sweep}
    rates = {engine: [row["predicted"] for row in fit["rows"]] for engine, fit in fits.items()}
    ahead = [rate > max(rivals) for rate, *rivals in zip(rates["prelude"], rates["vllm"], rates["sglang"], strict=True)]
    yield WORDING.claim("leads", all(ahead), ahead=sum(ahead), count=len(ahead))
    change = ends(row["switched"] / row["predicted"] - 1 for row in fits["prelude"]["rows"])
    costs = "; ".join(
        f"{engine} {1e3 * (fit['overhead'] + fit['host']):.1f} and {1e3 * fit['per_prompt']:.1f}"
        for engine, fit in fits.items()
    )
    yield WORDING.claim("switched", change[1] < 0, change=change, costs=costs)
    for fit in sweep:
        for row in fit["rows"]:
            low, high = row["any_share"]
            inside, values = low <= row["published"] <= high, row | {"printed": row["published"]}
            if not row["fitted"]:
                yield WORDING.claim("sweep", inside, engine=fit["engine"], **values)


def _decode_claims(decode: list[Document]) -> Iterator[Claim]:
    metrics = {
        (task["engine"], task["held"], row["metric"]): (row["published"], row["predicted"])
        for task in decode
        for row in task["rows"]
    }
    for engine in ENGINES:
        published = metrics[engine, False, "ttft"][0]
        low, high = ends(metrics[engine, blocks, "ttft"][1] for blocks in (False, True))
        agrees = low <= published <= high
        yield WORDING.claim("decode", agrees, engine=engine, printed=published, predicted=(low, high))
    (printed, first), (_, second) = (
        [a / b for a, b in zip(metrics["prelude", blocks, "rate"], metrics["vllm", blocks, "rate"], strict=True)]
        for blocks in (False, True)
    )
    low, high = ends([first, second])
    yield WORDING.claim("ratio", low <= printed <= high, printed=printed, predicted=(low, high))


def _table_claims(row: Document) -> Iterator[Claim]:
    fits, quick = row["p50_4b"] <= row["cycle_4b"], row["ttft_06b"] <= row["p50_4b"]
    half = (
        f"possible only if the faster half of the requests took at most {1e3 * row['faster_half']:.1f} ms in the mean"
    )
    both = "no set of fixed costs can give both: the two benchmarks did not meet the same engine"
    yield WORDING.claim("cycle", fits, reason="" if fits else half, **row)
    yield WORDING.claim("client", row["client_decode"] <= row["client_one_shot"], **row)
    yield WORDING.claim("small", quick, reason="both with one client" if quick else both, **row)


def _lifetime_claims(loads: Document) -> Iterator[Claim]:
    calm, saturated = loads["open"], loads["saturated"]
    by_name = {row["variant"]: row["mean"] for row in calm["variants"]}
    one_shot, shaped = by_name["one-shot"], by_name["decode-shaped"]
    means = {row["variant"]: row["mean"] for row in saturated["variants"]}
    held, pair = "judge_blocks_held", {"one_shot": one_shot, "shaped": shaped}
    yield WORDING.claim("seat", one_shot["judge_slots"] == 0, **pair)
    yield WORDING.claim("kv", one_shot[held] < shaped[held], **pair)
    for row in saturated["differences"]:
        variant, intervals = row["to"], row["intervals"]
        gain = [end / means[variant]["chat_tokens_per_second"] for end in intervals["chat_tokens_per_second"]]
        share, tpot = means[variant][held] / one_shot["kv_blocks"], intervals["chat_tpot.mean"]
        yield WORDING.claim("throughput", gain[0] > 0, variant=variant, gain=gain, tpot=tpot, share=share)
    for row in calm["differences"]:
        judges, chats = (row["intervals"][f"{who}_ttft.mean"] for who in ("judge", "chat"))
        yield WORDING.claim("sooner", judges[1] < 0, variant=row["to"], judges=judges, chats=chats)
    ttft = [by_name[name]["chat_ttft"]["mean"] for name in ("one-shot", "one-shot, answers reserved")]
    yield WORDING.claim("reserving", ttft[1] > ttft[0], ttft=ttft)


def _prefix_claims(summary: Document) -> Iterator[Claim]:
    jobs = summary["cold"]
    exact = [job["expected"][name] == job["runs"][name]["computed_tokens"] for job in jobs for name in job["expected"]]
    pairs = [(job["runs"]["led"], job["runs"]["not led"]) for job in jobs]
    saved = (f"{apart['computed_tokens'] / led['computed_tokens']:.1f}" for led, apart in pairs)
    sooner = [led["ttft"]["mean"] < apart["ttft"]["mean"] for led, apart in pairs]
    peers = ", ".join(str(job["peers"]) for job in jobs)
    yield WORDING.claim("cold", all(exact), peers=peers, saved=", ".join(saved))
    yield WORDING.claim("waiting", all(sooner), sooner=sum(sooner), count=len(sooner))
    over = {row["variant"]: row for row in summary["led_over"]}
    tokens, ttft = (
        [end - 1 for end in over["not led"]["intervals"][name]] for name in ("computed_tokens", "ttft.mean")
    )
    within = over["shared within a step"]["mean"]["ttft.mean"] - 1
    yield WORDING.claim("bursts", tokens[1] < 0, tokens=tokens, ttft=ttft, within=within)


# -- the report --------------------------------------------------------------------------------------------------------


def tables(document: Document) -> Report:
    """Tables 5 and 6 beside the fitted engines, judges among chats, shared rubrics, then the disagreements in words."""
    sweep, prefixes = document["sweep"], document["prefixes"]
    misfits = {fit["engine"]: f"{100 * fit['misfit']:.1f} %" for fit in document["sweep_all_rows"]}
    costs = [{**fit, "all_rows": misfits.get(fit["engine"], "-"), "rate": 1 / fit["latency_alone"]} for fit in sweep]
    peaks = [
        {**row, "times": row["ttft"] / row["ttft_floor"], "share": row["best_rate"] / row["rate_ceiling"]}
        for row in document["floors"]
    ]
    return sections(
        [
            WORDING.section("sweep", [{**row, "engine": fit["engine"]} for fit in sweep for row in fit["rows"]]),
            WORDING.section("costs", costs),
            (WORDING.title("decode"), _decode(document["decode_control"])),
            WORDING.section("floors", peaks),
            *(
                WORDING.section("lifetimes", results["variants"], load=load)
                for load, results in document["lifetimes"]["loads"].items()
            ),
            WORDING.section("steady", prefixes["steady"]),
            (WORDING.title("cold"), _cold(prefixes["cold"])),
            *conclusion(document),
        ]
    )


def _decode(predictions: list[Document]) -> Table:
    result, rates = WORDING.table("decode", []), WORDING.texts["tables"]["rates"]["cells"]
    by_engine = {(prediction["engine"], prediction["held"]): prediction["rows"] for prediction in predictions}
    for engine in dict.fromkeys(prediction["engine"] for prediction in predictions):
        for row, blocking in zip(by_engine[engine, False], by_engine[engine, True], strict=True):
            values = {**row, "engine": engine, "blocking": blocking, "name": f"{row['metric'].upper()} ms"}
            if row["metric"] == "rate":
                result.rows += rows_table("", rates, [values | {"name": "req/s"}]).rows
            else:
                result.rows += WORDING.table("decode", [values]).rows
    return result


def _cold(jobs: list[Document]) -> Table:
    names, cell = list(jobs[0]["runs"]), WORDING.texts["tables"]["cold"]["cells"]
    runs = (cell.replace("%s", name) for name in names)
    return rows_table(
        " | ".join(["peers", "expected led", "not led", *names]),
        " | ".join(["{peers}", "{expected[led]}", "{expected[not led]}", *runs]),
        jobs,
    )


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
    title(axes, "Prelude, Table 5: Qwen3-4B, 512 tokens in, 1 out")
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
    title(axes, "Judges among chats, below capacity (simulated)")
    axes.legend(fontsize=8, frameon=False)
