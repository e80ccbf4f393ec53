"""The plugin against unmodified files of vLLM releases, taken from the package index when the test runs."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from vllm_files import NotAvailableError, fetch, newest_version

NAMED_RELEASES = ["0.20.2", "0.21.0", "0.22.1", "0.23.0", "0.25.0", "0.26.0"]
FILES = [
    "vllm/distributed/kv_events.py",
    "vllm/distributed/kv_transfer/kv_connector/utils.py",
    "vllm/distributed/kv_transfer/kv_connector/v1/base.py",
    "vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py",
    "vllm/v1/outputs.py",
]


@cache
def _release(version: str) -> Path | str:
    try:
        return fetch(newest_version() if version == "newest" else version, FILES)
    except NotAvailableError as error:
        return str(error)


@pytest.fixture(params=[*NAMED_RELEASES, "newest"])
def vllm(request: pytest.FixtureRequest) -> Path:
    release = _release(request.param)
    if isinstance(release, str):
        pytest.skip(f"the release cannot be had from the package index: {release}")
    return release


def run(vllm: Path, scenario: str) -> dict[str, Any]:
    script = Path(__file__).parent / "scenario.py"
    result = subprocess.run(
        [sys.executable, str(script), str(vllm), scenario], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_without_the_plugin_the_childrens_events_are_lost(vllm: Path) -> None:
    answer = run(vllm, "unpatched")
    assert answer["published"] == []
    assert answer["second_step"] == []


@pytest.mark.parametrize("scenario", ["patched", "subclass"])
def test_with_the_plugin_all_events_arrive_and_each_child_sees_only_its_own(vllm: Path, scenario: str) -> None:
    answer = run(vllm, scenario)
    assert answer["published"] == [1, 2, 3]
    assert answer["second_step"] == [4]
    assert answer["seen"] == [["PoolEvents", "NoneType"], ["OtherPoolEvents", "OtherPoolEvents"]]
    assert answer["messages"] == ["kvroute plugin: MultiConnector hands on the KV events of its children"]


@pytest.mark.parametrize("scenario", ["same_class", "tensor_parallel", "tensor_parallel_same_class"])
def test_two_children_of_one_class_and_several_ranks_stay_apart(vllm: Path, scenario: str) -> None:
    answer = run(vllm, scenario)
    assert answer["published"] == [1, 2, 3]
    assert answer["second_step"] == [4]


def test_a_child_that_is_silent_on_the_first_rank_is_not_lost(vllm: Path) -> None:
    assert run(vllm, "silent_first_rank")["published"] == [1, 9]


def test_a_multi_connector_inside_a_multi_connector_hands_on_too(vllm: Path) -> None:
    assert run(vllm, "nested")["published"] == [7, 8]


def test_a_child_that_raises_costs_only_its_own_events(vllm: Path) -> None:
    answer = run(vllm, "broken_child")
    assert answer["published"] == [5]
    assert answer["messages"][-1] == "kvroute plugin: events of RaisingChild are lost (RuntimeError: broken child)"


def test_where_vllm_implements_the_method_the_plugin_does_nothing_and_says_so_once(vllm: Path) -> None:
    answer = run(vllm, "implemented")
    assert answer["own"] == "vllm's own"
    assert answer["messages"] == [
        "kvroute plugin: this vLLM release hands on its children's events itself, nothing to do"
    ]


def test_a_release_without_worker_side_events_is_left_alone(vllm: Path) -> None:
    assert run(vllm, "no_worker_events")["messages"] == [
        "kvroute plugin: this vLLM release has no worker-side connector events, nothing to hand on"
    ]


def test_registration_never_raises_even_when_vllm_cannot_be_imported(vllm: Path) -> None:
    (message,) = run(vllm, "import_breaks")["messages"]
    assert message.startswith("kvroute plugin: MultiConnector left as it is (ModuleNotFoundError")
