"""Tables of the reproduced SUN paper: published beside computed, and the disagreements."""

from __future__ import annotations

from reports.blocks import Report, Table
from reports.layout import Document, Section, bullets, disagreements, milliseconds, percent, sections, table

FORMS = {
    "batching": "batching, rows free: what the roofline says",
    "rows": "every row",
    "neither": "neither: KV alone",
}


def tables(document: Document) -> Report:
    """Table 4's high concurrency, pools of decode workers, skew over models, then the disagreements in words."""
    skew = document["skew"]
    parts: list[Section] = [
        ("Table 4, concurrency 16 from concurrency 1 and 4", _concurrency(document["concurrency"])),
        ("The decode line behind it: microseconds, and nanoseconds a KV token", _fits(document["concurrency"]["fits"])),
        (
            "Who bears what four sequences cost beyond their KV: mean errors in closed form",
            _forms(document["concurrency"]["forms"]),
        ),
        ("Figure 3: tok/s a decode GPU and interactivity against isolated (* fixes the load)", _pool(document["pool"])),
        (
            f"Figure 4: {skew['rate']:.2f} requests/s, answers of {skew['answer']} tokens,"
            f" {skew['replications']} minutes each",
            _skew(skew),
        ),
        ("Sizes of the effect of skew, zipf 2", _sizes(skew["sizes"])),
        ("What disagrees", disagreements(document["claims"])),
        ("Notes", bullets(document["notes"])),
    ]
    return sections(parts)


def _concurrency(found: Document) -> Table:
    shown = table("model", "method", "in", "TPOT ms", "predicted", "error", "any split", "tok/s", "predicted", "error")
    for row in found["rows"]:
        if row["fitted"]:
            continue
        published, predicted, errors = row["published"], row["predicted"], row["errors"]
        low, high = sorted(row["tpot_any_split"])
        shown.add_row(
            row["model"],
            row["method"],
            str(row["prompt"]),
            milliseconds(published["tpot"]),
            f"{1e3 * predicted['tpot']:.2f}",
            percent(errors["tpot"]),
            f"{1e3 * low:.1f}-{1e3 * high:.1f}",
            f"{published['throughput']:.1f}",
            f"{predicted['throughput']:.1f}",
            percent(errors["throughput"]),
        )
    means = {metric: f"{100 * found['errors'][metric]['mean']:.2f} %" for metric in ("tpot", "throughput")}
    shown.add_row("mean |error|", "", "", "", "", means["tpot"], "", "", "", means["throughput"])
    for name, error in found["errors"]["tpot"]["by_method"].items():
        throughput = found["errors"]["throughput"]["by_method"][name]
        model, _, method = name.rpartition(" ")
        shown.add_row(model, method, "", "", "", f"{100 * error:.2f} %", "", "", "", f"{100 * throughput:.2f} %")
    return shown


def _fits(fits: list[Document]) -> Table:
    shown = table("model", "β, 16 bits", "β, 4 bits", "batching", "KV token", "misfit", "ridge, 16 bits", "4 bits")
    for fit in fits:
        shown.add_row(
            fit["model"],
            *(f"{1e6 * seconds:.0f}" for seconds in (fit["weights"]["16"], fit["weights"]["4"], fit["batching"])),
            f"{1e9 * fit['per_kv_token']:.0f}",
            f"{100 * fit['misfit']:.1f} %",
            *(f"{fit['ridge_rows'][bits]:.0f} rows" for bits in ("16", "4")),
        )
    return shown


def _forms(forms: list[Document]) -> Table:
    shown = table("borne by", "fit", "fitted rows", "TPOT at 16", "throughput at 16")
    for form in forms:
        errors = (f"{100 * form[name]:.2f} %" for name in ("misfit", "tpot_error", "throughput_error"))
        shown.add_row(FORMS[form["form"]], "TPOT alone" if form["plain"] else "both columns", *errors)
    return shown


def _pool(pool: Document) -> Table:
    """The printed pools, the chosen length, and the other possible lengths with the errors that they would give."""
    lengths = [pool["chosen"], *(each for each in pool["lengths"] if each["answer"] != pool["chosen"]["answer"])]
    shown = table("decode workers", "printed", *(f"{each['answer']} out" for each in lengths))
    for index, row in enumerate(pool["chosen"]["rows"]):
        star = "*" if row["fixes_the_load"] else ""
        shown.add_row(
            f"{row['workers']} {row['placement']}{star}",
            _pool_cell(row["published"]),
            *(_pool_cell(each["rows"][index]["predicted"]) for each in lengths),
        )
    shown.add_row("requests/s", "", *(f"{each['rate']:.2f}" for each in lengths))
    return shown


def _pool_cell(values: Document) -> str:
    return f"{values['throughput']:.0f} {100 * values['interactivity_change']:+.1f} %"


def _skew(skew: Document) -> Table:
    shown = table("decode", "zipf", "tok/s", "of offered", "TPOT ms", "interactivity", "TTFT ms")
    for point in skew["points"]:
        shown.add_row(
            point["placement"],
            f"{point['zipf']:g}",
            f"{point['throughput']:.0f}",
            f"{100 * point['achieved']:.1f} %",
            milliseconds(point["tpot"]),
            f"{point['interactivity']:.1f}",
            milliseconds(point["ttft"]),
        )
    return shown


def _sizes(sizes: list[Document]) -> Table:
    shown = table("change", "printed", "predicted", "one run of a minute")
    for size in sizes:
        low, high = size["one_run"]
        shown.add_row(
            size["what"],
            percent(size["published"]),
            percent(size["predicted"]),
            f"{percent(low)} to {percent(high)}",
        )
    return shown
