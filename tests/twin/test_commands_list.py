"""The list of commands: what `twin --help` says, and where each command is."""

from __future__ import annotations

import pytest

from twin.cli import COMMANDS, WIDTH, program, run


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_own_help_begins_with_its_summary(name: str) -> None:
    assert " ".join(program()[name].help.split("\n\n")[0].split()) == COMMANDS[name].summary


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    output = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"\n  {name} " in output
        assert command.summary in " ".join(output.split())
    assert max(map(len, output.splitlines())) <= WIDTH


def test_a_command_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulat"]) == 2
    message = capsys.readouterr().err
    assert message.startswith('twin: Unknown command "simulat"')
    assert message.endswith("(see twin --help)\n")
    assert message.count("\n") == 1
