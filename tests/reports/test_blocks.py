"""Blocks on a page: numbers of tables sort as numbers, answers and warnings come first, and nothing is lost."""

from __future__ import annotations

from reports.blocks import Column, Figure, Report, Shown, Table, Text, bullets, sections, table, texts
from reports.html import page
from tests.reports.pages.page_contents import Tables, columns, models
from tests.reports.rendering import lines_of


def test_columns_of_numbers_with_one_unit_are_numbers() -> None:
    errors = table("", "error", "time", "seconds")
    for row in (("a", "+1.5 %", "10 ms", "1,200"), ("b", "-12.0 %", "2 ms", "–"), ("c", "3.0 %", "1 s", "7")):
        errors.add_row(*row)
    html = page(sections([("Errors", errors)]), {})
    (data,) = columns(html)
    assert data["c0"] == ["a", "b", "c"]
    assert data["c1"] == [1.5, -12.0, 3.0]
    assert data["c2"] == ["10 ms", "2 ms", "1 s"]  # two units: text
    assert data["c3"] == [1200, {"type": "number", "value": "nan"}, 7]
    assert [column["title"] for column in models(html, "TableColumn")] == ["", "error, %", "time", "seconds"]
    assert "<h2>Errors</h2>" in html


def test_an_empty_first_cell_is_that_of_the_row_above() -> None:
    shares = table("load", "kind", "share")
    for row in (("0.5", "decode", "1"), ("", "mixed", "0.0001"), ("0.7", "decode", "2"), ("", "mixed", "3")):
        shares.add_row(*row)
    (data,) = columns(page(Report("", [shares]), {}))
    assert data["c0"] == [0.5, 0.5, 0.7, 0.7]
    assert data["c2"] == ["1", "0.0001", "2", "3"]  # four decimals would show 0


def test_texts_lists_and_tables_are_kept_and_warnings_come_first() -> None:
    wide = Table([Column("name"), Column("last", 5)], [["x", "[b]<1>[/]"], ["y", Shown("10 ms", 0.01, "s")]])
    blocks = [Text("one\ntwo & three"), bullets(["a", "b"]), wide, *texts(["first", "second"], "warning")]
    html = page(Report("page", blocks), {})
    assert "<p>one</p><p>two &amp; three</p>" in html
    assert "<ul><li>a</li><li>b</li></ul>" in html
    assert ["x", "[b]<1>[/]"] in Tables(html).rows
    assert ["y", "10 ms"] in Tables(html).rows
    assert html.index("first") < html.index("1 more warnings") < html.index("second") < html.index("<p>one")


def test_columns_with_few_texts_can_be_filtered() -> None:
    metrics = table("metric", "side", "value")
    for index in range(10):
        metrics.add_row(f"metric {index}", ("printed", "found")[index % 2], str(index))
    choices = models(page(Report("", [metrics]), {}), "MultiChoice")
    assert [choice["title"] for choice in choices] == ["only side"]


def test_a_terminal_has_no_details_and_names_the_columns_that_do_not_fit() -> None:
    long = Table([Column("a"), Column("b", 2), Column("c", 1)], [["x" * 10, "y" * 10, "z" * 10]], fits=True)
    blocks = [Text("detail", detail=True), Figure("", []), long, Text("End", "heading")]
    assert lines_of(Report("", blocks), 25) == [
        "         a           c", "xxxxxxxxxx  zzzzzzzzzz", "Left out for lack of", "width: b.", "", "End",
    ]  # fmt: skip
