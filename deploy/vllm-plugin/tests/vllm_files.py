"""Fetches single files of a released vLLM wheel with HTTP range requests, without downloading the wheel."""

import io
import json
import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

CACHE = Path(os.environ.get("KVROUTE_TEST_CACHE", Path.home() / ".cache" / "kvroute-tests")) / "vllm-files"
TIMEOUT_SECONDS = 60
BLOCK = 256 * 1024
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in range(17, 42)), "manylinux2014_x86_64", "manylinux1_x86_64"]


class NotAvailableError(RuntimeError):
    """The package index cannot be reached or does not have this release."""


class _RangeFile(io.RawIOBase):
    """A seekable file over HTTP that reads aligned blocks on demand."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._position = 0
        self._blocks: dict[int, bytes] = {}
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT_SECONDS) as response:
            self._size = int(response.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            first = number * BLOCK
            last = min(first + BLOCK, self._size) - 1
            request = urllib.request.Request(self._url, headers={"Range": f"bytes={first}-{last}"})
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                if response.status != 206:
                    raise NotAvailableError("the package index does not answer range requests")
                self._blocks[number] = response.read()
        return self._blocks[number]

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        length = min(len(buffer), max(0, self._size - self._position))
        done = 0
        while done < length:
            block = self._block(self._position // BLOCK)
            start = self._position % BLOCK
            part = block[start : start + length - done]
            buffer[done : done + len(part)] = part
            done += len(part)
            self._position += len(part)
        return done


def wheel_url(version: str) -> str:
    """Where pip would take this vLLM release from. Raises NotAvailableError."""
    command = [
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed"),
        *("--only-binary", ":all:", "--python-version", "3.11", "--implementation", "cp", "--abi", "abi3"),
        *(part for tag in PLATFORMS for part in ("--platform", tag)),
        *("--target", str(CACHE / "never-written"), "--report", "-", f"vllm=={version}"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if result.returncode:
        raise NotAvailableError(f"pip cannot resolve vllm {version}: {result.stderr.strip()[-300:]}")
    return str(json.loads(result.stdout)["install"][0]["download_info"]["url"])


def newest_version() -> str:
    """The newest vLLM release that pip sees. Raises NotAvailableError."""
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if result.returncode:
        raise NotAvailableError(f"pip cannot list vllm releases: {result.stderr.strip()[-300:]}")
    return str(json.loads(result.stdout)["versions"][0])


def fetch(version: str, members: list[str]) -> Path:
    """The folder that holds these files of the release, fetched on first use. Raises NotAvailableError."""
    target = CACHE / version
    missing = [member for member in members if not (target / member).exists()]
    if not missing:
        return target
    partial = CACHE / f".{version}.{os.getpid()}"
    try:
        with zipfile.ZipFile(io.BufferedReader(_RangeFile(wheel_url(version)), BLOCK)) as wheel:
            for member in missing:
                destination = partial / member
                destination.parent.mkdir(parents=True, exist_ok=True)
                destination.write_bytes(wheel.read(member))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise NotAvailableError(f"vllm {version}: {error}") from error
    for member in missing:
        (target / member).parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial / member, target / member)
    shutil.rmtree(partial, ignore_errors=True)
    return target


if __name__ == "__main__":
    print(fetch(sys.argv[1], sys.argv[2:]))
