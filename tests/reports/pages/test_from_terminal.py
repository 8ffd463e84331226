"""Tables of a terminal on a page: their numbers sort as numbers, and nothing of them is lost."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from reports.fitting_table import Column, FittingTable
from reports.layout import bullets, sections, table
from reports.pages.frame import whole_page
from reports.pages.from_terminal import parts_of
from tests.reports.pages.page_contents import columns, models


def test_columns_of_numbers_with_one_unit_are_numbers() -> None:
    shown = table("", "error", "time", "seconds")
    for row in (("a", "+1.5 %", "10 ms", "1,200"), ("b", "-12.0 %", "2 ms", "–"), ("c", "3.0 %", "1 s", "7")):
        shown.add_row(*row)
    page = whole_page("page", parts_of(sections([("Errors", shown)])), {})
    (data,) = columns(page)
    assert data["c0"] == ["a", "b", "c"]
    assert data["c1"] == [1.5, -12.0, 3.0]
    assert data["c2"] == ["10 ms", "2 ms", "1 s"]  # two units: text
    assert data["c3"] == [1200, {"type": "number", "value": "nan"}, 7]
    assert [each["title"] for each in models(page, "TableColumn")] == ["", "error, %", "time", "seconds"]
    assert "<h2>Errors</h2>" in page


def test_an_empty_first_cell_is_that_of_the_row_above() -> None:
    shown = table("load", "kind", "share")
    for row in (("0.5", "decode", "1"), ("", "mixed", "0.0001"), ("0.7", "decode", "2"), ("", "mixed", "3")):
        shown.add_row(*row)
    (data,) = columns(whole_page("page", parts_of(shown), {}))
    assert data["c0"] == [0.5, 0.5, 0.7, 0.7]
    assert data["c2"] == ["1", "0.0001", "2", "3"]  # four decimals would show 0


def test_texts_lists_and_tables_that_fit_are_kept() -> None:
    fitting = FittingTable([Column("name", ["x", "y"]), Column("left out on a terminal", ["[bold]<1>[/]", "<2>"], 5)])
    page = whole_page("page", parts_of(Group(Text("one\ntwo & three"), bullets(["a", "b"]), fitting, "[1, 2]")), {})
    assert "<p>one</p><p>two &amp; three</p>" in page
    assert "<ul><li>a</li><li>b</li></ul>" in page
    assert "<pre>[1, 2]</pre>" in page
    (data,) = columns(page)
    assert data["c1"] == ["[bold]<1>[/]", "<2>"]


def test_columns_with_few_texts_can_be_filtered() -> None:
    shown = table("metric", "side", "value")
    for index in range(10):
        shown.add_row(f"metric {index}", ("printed", "found")[index % 2], str(index))
    choices = models(whole_page("page", parts_of(shown), {}), "MultiChoice")
    assert [each["title"] for each in choices] == ["only side"]
