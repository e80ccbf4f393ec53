"""A short coverage-guided run over the codecs, seeded with captured payloads."""

import importlib.util
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.captures import pool_capture, publisher_capture

SECONDS = 8
MEMORY_MB = 512


@pytest.mark.fuzz
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed on this platform")
def test_no_input_crashes_a_codec_and_memory_stays_within_its_limit(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    payloads = {pool_capture("memcache-1.3.0_cleared")["frames_hex"][0][2]}
    for name in ("vllm-0.9.2", "vllm-0.23.0", "vllm-0.33.0"):
        cases = publisher_capture(name)["sessions"][0]["cases"]
        payloads |= {case["frames_hex"][2] for case in cases if "frames_hex" in case}
    for number, payload in enumerate(sorted(payloads)):
        (corpus / str(number)).write_bytes(bytes.fromhex(payload))
    # Linux counts the parent's peak as the child's own, so the limit begins there.
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    limits = [f"-max_total_time={SECONDS}", f"-rss_limit_mb={MEMORY_MB + peak_mb}", "-max_len=4096", "-timeout=2"]
    command = [sys.executable, str(Path(__file__).parent / "wire_target.py"), str(corpus), *limits]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    done = re.search(r"Done (\d+) runs", run.stderr)
    assert done is not None, run.stderr[-4000:]
    assert int(done[1]) > 1000
