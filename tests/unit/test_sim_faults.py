"""The ways in which a simulated engine can be told to misbehave."""

import pytest
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.sim.fault_names import FAULTS, Fault, parse_fault
from kvroute.sim.faults import RankFaults
from kvroute.sim.publisher import Frames
from kvroute.sim.vllm_events import AllBlocksCleared, BlockRemoved


def message(seq: int) -> Frames:
    return (b"kv-events", seq.to_bytes(8, "big"), b"payload")


def numbers(faults: RankFaults, count: int) -> list[int]:
    return [int.from_bytes(frames[1], "big") for seq in range(count) for frames in faults.wire(message(seq))]


def test_a_fault_is_a_name_with_or_without_a_measure() -> None:
    assert parse_fault("drop") == Fault("drop", 0.2)
    assert parse_fault("drop=0.5") == Fault("drop", 0.5)
    assert parse_fault("restart=7") == Fault("restart", 7)
    assert parse_fault("no-end") == Fault("no-end")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("drpo", "did you mean drop"),
        ("nonsense-altogether", "known: restart,"),
        ("drop=much", "is not a number"),
        ("drop=1.5", "probability above 0, at most 1"),
        ("drop=0", "probability"),
        ("restart=1.5", "whole number from 1"),
        ("restart=-1", "whole number"),
        ("no-end=3", "takes no value"),
    ],
)
def test_a_fault_that_cannot_be_is_named_with_what_to_write(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_fault(text)


def test_the_help_of_the_command_explains_every_fault() -> None:
    text = CliRunner().invoke(app, ["sim", "engine", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for name, (_, explanation) in FAULTS.items():
        assert name in text
        assert explanation[:40] in text


def test_the_command_refuses_an_unknown_fault() -> None:
    result = CliRunner().invoke(app, ["sim", "engine", "--fault", "drpo"])
    assert result.exit_code == 2
    assert "did you mean drop" in result.output


def test_without_a_fault_everything_passes() -> None:
    assert numbers(RankFaults(), 5) == [0, 1, 2, 3, 4]


def test_messages_are_lost_doubled_or_overtaken() -> None:
    assert numbers(RankFaults([Fault("duplicate", 2)]), 4) == [0, 1, 1, 2, 3, 3]
    assert numbers(RankFaults([Fault("reorder", 2)]), 5) == [0, 2, 1, 4, 3]
    lost = 1000 - len(numbers(RankFaults([Fault("drop", 0.2)]), 1000))
    assert 150 < lost < 250


def test_a_spoilt_message_keeps_its_number() -> None:
    topic, sequence, payload = next(iter(RankFaults([Fault("poison", 1)]).wire(message(3))))
    assert (topic, sequence) == message(3)[:2]
    assert payload != b"payload"


def test_what_happens_once_happens_once() -> None:
    faults = RankFaults([Fault("restart", 2)])
    assert faults.due("restart") is None
    numbers(faults, 2)
    assert faults.due("restart") == "restart"
    assert faults.due("restart") is None


def test_removals_and_clears_can_be_kept_to_itself() -> None:
    removal = BlockRemoved(block_hashes=[5], medium="GPU")
    assert RankFaults([Fault("lost-removals", 1.0)]).events([removal]) == []
    assert RankFaults([Fault("unsent-clear")]).events([AllBlocksCleared()]) == []
    (changed,) = RankFaults([Fault("absent-removals")]).events([removal])
    assert isinstance(changed, BlockRemoved)
    assert changed.block_hashes[1:] == [5]
