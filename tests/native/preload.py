"""A pytest plugin: the compiled core named by KVROUTE_TEST_CORE is used in place of the installed one."""

import importlib.machinery
import importlib.util
import os
import sys

NAME = "services.router.index.native._core"


def pytest_configure() -> None:
    """Load it before anything imports the index."""
    path = os.environ["KVROUTE_TEST_CORE"]
    spec = importlib.util.spec_from_loader(NAME, importlib.machinery.ExtensionFileLoader(NAME, path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module


def pytest_report_header() -> str:
    """Say so, for the test that asked for it."""
    return "sanitized core loaded"
