"""Imports unmodified vLLM files without vLLM's dependencies: whatever is not on disk becomes a permissive stub."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

STUBBED = ("vllm", "torch", "numpy", "zmq", "transformers", "prometheus_client", "regex", "cbor2", "einops")


class _StubMeta(type):
    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stub_class(name)

    def __or__(cls, other: object) -> object:
        return cls

    __ror__ = __or__

    def __getitem__(cls, item: object) -> object:
        return cls

    def __call__(cls, *args: object, **kwargs: object) -> object:
        if cls.__dict__.get("_is_stub") and len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # used as a decorator
        return super().__call__()


def _stub_class(name: str) -> type:
    return _StubMeta(name, (), {"_is_stub": True})


class _Logger:
    def __getattr__(self, name: str) -> object:
        return lambda *args, **kwargs: None


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "init_logger":
            return lambda *args: _Logger()
        value = _stub_class(name)
        setattr(self, name, value)
        return value


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Real files below `root` where they exist, stub modules for everything else that vLLM would import."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in STUBBED:
            return None
        file = self._root / (name.replace(".", "/") + ".py")
        if file.exists():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


def install(root: Path) -> None:
    """Make ``import vllm...`` find the fetched files and stubs."""
    sys.meta_path.insert(0, StubFinder(root))
