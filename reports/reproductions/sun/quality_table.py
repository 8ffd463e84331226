"""Tables of SUN's claims about accuracy: small models trained here beside the printed ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from reports.blocks import Report, Table
from reports.layout import Document, Section, bullets, disagreements, sections, table

NAMES = {
    "base": "base",
    "full": "full fine-tuning",
    "naive": "naive sharing",
    "sun": "SUN",
    "sun_attention": "SUN, attention only",
    "sun_low_rank": "SUN, low rank",
} | {
    f"{variant}_{quantiser}{bits}": f"{name}{quantiser.upper()}, {bits} bits"
    for quantiser in ("rtn", "gptq", "awq")
    for bits in (4, 3)
    for variant, name in (("full", "full fine-tuning, then "), ("sun", "SUN, decoder then "), ("qsun", "QSUN, "))
}
"""Variants as tables and figures name them."""


def tables(document: Document) -> Report:
    """Exact match of every variant, the claims with what is found, what disagrees, and notes."""
    size, bases = document["size"]["operations"], document["bases"]
    per_seed = ", ".join(f"{100 * _mean(base['exact_match'].values()):.1f}" for base in bases)
    about = (
        f"A base model of {bases[0]['parameters']:,} parameters ({size['layers']} layers, width {size['hidden']}),"
        f" {size['digits']} digits, {len(bases)} seeds; on its own eight operations {per_seed} %"
    )
    parts: list[Section] = [
        (f"{about}\nExact match on operations it has not seen, % (and 95 % interval over seeds)", _variants(document)),
        *_text(document),
        ("Claims", _claims(document["claims"])),
        ("What disagrees", disagreements(document["claims"])),
        ("Notes", bullets(document["notes"])),
    ]
    return sections(parts)


def _variants(document: Document) -> Table:
    rows = document["variants"]
    names = list(rows[0]["by_task"])
    shown = table("variant", *names, "mean", "interval", "trained", "printed (other models and tasks)")
    for row in rows:
        shown.add_row(
            NAMES.get(row["variant"], row["variant"]),
            *(f"{100 * row['by_task'][name]['exact_match']:.1f}" for name in names),
            f"{100 * row['exact_match']:.1f}",
            _span(row["interval"]),
            f"{row['trained_parameters']:,}" if row["trained_parameters"] else "",
            _span(row["printed"]),
        )
    return shown


def _text(document: Document) -> Iterator[Section]:
    """The tasks of text, if there are any: exact match, right tokens, and perplexity, with intervals over seeds."""
    rows, bases = document["text_variants"], document["text_bases"]
    if not rows:
        return
    per_seed = ", ".join(f"{base['perplexity']:.2f}" for base in bases)
    about = (
        f"A language model of {bases[0]['parameters']:,} parameters on the {bases[0]['corpus']['description']},"
        f" {len(bases)} seeds; held-out perplexity {per_seed}"
    )
    for task in rows[0]["by_task"]:
        shown = table("variant", "exact match, %", "over seeds", "right tokens, %", "over seeds", "perplexity")
        for row in rows:
            measures = row["by_task"][task]
            exact, right = measures["exact_match"], measures["token_accuracy"]
            shown.add_row(
                NAMES.get(row["variant"], row["variant"]), f"{100 * exact['mean']:.1f}", _span(exact["interval"]),
                f"{100 * right['mean']:.1f}", _span(right["interval"]), f"{measures['perplexity']['mean']:.3f}",
            )  # fmt: skip
        yield f"{about}\nTask {task}", shown


def _claims(claims: list[Document]) -> Table:
    shown = table("claim", "where", "printed", "found", "over seeds", "tasks", "holds")
    for claim in claims:
        shown.add_row(
            claim["what"], claim["where"], claim["published"], claim["found"], _span(claim["interval"]), claim["tasks"],
            "yes" if claim["agrees"] else "no",
        )  # fmt: skip
    return shown


def _span(ends: list[float] | None) -> str:
    return f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f}" if ends else ""


def _mean(values: Iterable[float]) -> float:
    each = list(values)
    return sum(each) / len(each)
