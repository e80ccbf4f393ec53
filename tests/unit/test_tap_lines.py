"""What ``kvroute tap`` prints for a state note."""

import json

import pytest
import typer
from typer.testing import CliRunner

from kvroute.commands.tap import tap
from kvroute.taps.follow import state_subjects
from kvroute.taps.state_lines import as_json, as_text
from schemas.events import StateNote

NOTE = StateNote(
    state="confirmed",
    model="m",
    at=1_800_000_000.25,
    service="matcher",
    source="pool",
    instance_id="memcache-pool",
    event_type="stored",
    medium="cpu",
    backend_id="10.0.0.5",
    blocks=2,
    seq=7,
    preview=("00ff", "01ff"),
)


def test_a_line_shows_time_state_and_what_is_known() -> None:
    line = as_text(NOTE).plain
    assert line.startswith("08:00:00.250 confirmed")
    for words in ("memcache-pool", "medium=cpu", "backend=10.0.0.5", "blocks=2", "seq=7", "hashes=00ff,01ff"):
        assert words in line
    assert "reason=" not in line


def test_an_engines_line_names_its_dp_rank() -> None:
    assert (
        "engine vllm-1 dp3"
        in as_text(StateNote("received", "m", source="engine", instance_id="vllm-1", dp_rank=3)).plain
    )


def test_json_has_every_field_in_one_line() -> None:
    line = as_json(NOTE)
    assert "\n" not in line
    assert json.loads(line)["preview"] == ["00ff", "01ff"]


@pytest.mark.parametrize(
    ("states", "model", "subjects"),
    [
        ([], None, ["kv.state.*.*"]),
        (["matched"], None, ["kv.state.matched.*"]),
        (
            ["matched", "dropped"],
            "org/model.1",
            ["kv.state.matched.org=2Fmodel=2E1", "kv.state.dropped.org=2Fmodel=2E1"],
        ),
    ],
)
def test_state_and_model_choose_the_subjects(states: list[str], model: str | None, subjects: list[str]) -> None:
    assert state_subjects(states, model) == subjects


def test_an_unknown_state_is_refused_with_the_list_of_states() -> None:
    app = typer.Typer()
    app.command()(tap)
    result = CliRunner().invoke(app, ["--state", "lost"])
    assert result.exit_code == 2
    assert "unknown state 'lost'" in result.output.replace("\n", " ")
