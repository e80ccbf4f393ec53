"""The ``kvroute`` command explains itself."""

import re

import pytest
from typer.testing import CliRunner

from kvroute import __version__
from kvroute.cli import app

COMMANDS = ("config", "demo", "sim", "tap", "up")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, list(arguments))
    return result.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", result.output)


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_every_command_with_what_it_does(option: str) -> None:
    code, text = run(option)
    assert code == 0
    for command in COMMANDS:
        assert re.search(rf"^\W*{command} +\w.{{15,}}", text, re.MULTILINE), command


def test_without_a_command_it_shows_the_help() -> None:
    assert "Usage:" in run()[1]


def test_it_tells_its_version() -> None:
    assert run("--version") == (0, f"kvroute {__version__}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    code, text = run(command, "--help")
    assert code == 0
    assert "Usage:" in text


def test_an_unknown_command_is_refused() -> None:
    code, text = run("uup")
    assert code == 2
    assert "uup" in text
