"""`twin reproduce` refuses papers, options and traces that it cannot use, in one line and before a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from twin.cli import run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["moon"], "moon"),
        (["afd", "--quality"], "--quality: expected it with sun or spear only, found it with afd"),
        (["prelude", "--quality"], "--quality: expected it with sun or spear only, found it with prelude"),
        (["sun", "--full"], "--full: got 'True', expected it with --quality only"),
        (["sun", "--seeds", "2"], "--seeds: got '2', expected it with --quality only"),
        (["sun", "--quality", "--seeds", "0"], "--seeds: got 0"),
        (["sun", "--trace", "t.csv"], "--trace"),
        (["prelude", "--trace", "t.csv"], "afd or spear only"),
        (["afd", "--trace", "t.csv"], "t.csv: expected a file"),
        (["spear", "--trace", "t.csv"], "t.csv"),
        (["spear", "--trace", "broken.csv"], "broken.csv"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.csv").write_text("a,b\n1,2\n")
    assert run(["reproduce", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert output.err.count("\n") == 1
    assert not Path("runs").exists()
