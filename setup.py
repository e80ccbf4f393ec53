"""The compiled parts; the rest of the project's metadata is in pyproject.toml.

Where no C compiler is present the installation succeeds without them, and the services say that they run in plain
Python.
"""

import os
from glob import glob

from setuptools import Extension, setup

INDEX = "services/router/index/native"
HASHING = "schemas/native"
OPTIONS = {
    "define_macros": [("_GNU_SOURCE", "1")],
    "extra_compile_args": os.environ.get(
        "KVROUTE_CFLAGS", "-std=c11 -O3 -g0 -flto=auto -fvisibility=hidden -Wall -Wextra"
    ).split(),
    "extra_link_args": os.environ.get("KVROUTE_LDFLAGS", "").split(),
    "py_limited_api": True,
    # KVROUTE_NATIVE=required: an installation without the compiled parts is an error, as in the image.
    "optional": os.environ.get("KVROUTE_NATIVE") != "required",
}
SHARED = [f"{HASHING}/xxh3.c", f"{HASHING}/block_hashes.c"]


def headers(*folders: str) -> list[str]:
    """What a change makes the sources be compiled again."""
    return [header for folder in folders for header in glob(f"{folder}/*.h")]


setup(
    ext_modules=[
        Extension(
            f"{HASHING}/_hashing".replace("/", "."),
            [f"{HASHING}/module.c", f"{HASHING}/json_tokens.c", *SHARED],
            depends=headers(HASHING),
            **OPTIONS,
        ),
        Extension(
            f"{INDEX}/_core".replace("/", "."),
            [*sorted(glob(f"{INDEX}/*.c")), *SHARED],
            depends=headers(HASHING, INDEX),
            **OPTIONS,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
