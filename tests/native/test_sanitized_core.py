"""The compiled core under AddressSanitizer and UndefinedBehaviorSanitizer: fuzzed alone, and with the index suites."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDEX, HASHING = ROOT / "services/router/index/native", ROOT / "schemas/native"
FUZZ_SECONDS = 8
COMPILER = shutil.which("gcc")
SANITIZE = ["-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
SANITIZE += ["-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror"]
CORE = sorted(path for path in INDEX.glob("*.c") if not path.name.startswith(("object", "module")))
SHARED = [HASHING / "xxh3.c", HASHING / "block_hashes.c"]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no gcc on PATH")


def compiled(target: Path, *arguments: str | Path) -> Path:
    assert COMPILER is not None
    command = [COMPILER, *SANITIZE, f"-I{INDEX}", f"-I{HASHING}", "-o", str(target), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "cannot find" in done.stderr and "asan" in done.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.fuzz
def test_random_calls_that_break_every_rule_find_no_fault_in_the_core(tmp_path: Path) -> None:
    program = compiled(tmp_path / "index_fuzz", ROOT / "tests/native/index_fuzz.c", *CORE, *SHARED)
    run = subprocess.run([program, str(FUZZ_SECONDS)], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout[-200:] + run.stderr[-4000:]
    steps = re.search(r"(\d+) steps", run.stdout)
    assert steps is not None
    assert int(steps[1]) > 1000


def test_the_index_suites_pass_on_a_sanitized_build(tmp_path: Path) -> None:
    include = f"-I{sysconfig.get_path('include')}"
    core = compiled(tmp_path / "_core.so", "-shared", "-fPIC", include, *sorted(INDEX.glob("*.c")), *SHARED)
    assert COMPILER is not None
    runtime = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "KVROUTE_TEST_CORE": str(core),
        "PYTHONPATH": str(ROOT),
        "PYTHONMALLOC": "malloc",
    }
    suites = ["test_index_behaviour.py", "test_index_snapshots.py", "test_native_index.py"]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-p", "tests.native.preload", "-k", "not plain"]
    command += [str(ROOT / "tests/unit" / suite) for suite in suites]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "sanitized core loaded" in run.stdout
