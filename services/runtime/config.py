"""The one configuration: a YAML file plus environment variables, validated as a whole.

``KVROUTE_<SECTION>__<KEY>`` overrides the file; ``KVROUTE_CONFIG`` names the file when no option does.
"""

import difflib
import os
import re
import types
from pathlib import Path
from typing import Any, Self, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.coordinator.settings import CoordinatorSettings
from services.ingest.settings import IngestSettings
from services.matcher.settings import MatcherSettings
from services.router.settings import RouterSettings
from services.runtime.settings import LoggingSettings, NatsSettings, RedisSettings, RuntimeSettings

ENVIRONMENT_PREFIX = "KVROUTE_"
FILE_VARIABLE = "KVROUTE_CONFIG"
MAX_FILE_BYTES = 1024 * 1024
# Kubernetes describes every Service of the namespace to every Pod; one called kvroute-... looks like a setting.
_SERVICE_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_|$)|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?$")
_SHELL_VARIABLES = {FILE_VARIABLE, "KVROUTE_IMAGE", "KVROUTE_TEST_CACHE", "KVROUTE_VLLM_PYTHON"}


class ConfigError(ValueError):
    """A configuration that cannot be used; the text names every key and what to do."""


class DuplicateKeyError(yaml.YAMLError):
    """A key that stands twice in one mapping; YAML readers would take the last one without a word."""


class _UniqueKeys(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:merge" and name in lines:
                raise DuplicateKeyError(f"key {name} in line {line} stands in line {lines[name]} already; keep one")
            lines[name] = line
        return super().construct_mapping(node, deep)


class Config(BaseModel):
    """All sections. Every service reads the same configuration and uses its own section."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    nats: NatsSettings = Field(default_factory=NatsSettings)
    redis: RedisSettings = Field(default_factory=RedisSettings)
    logging: LoggingSettings = Field(default_factory=LoggingSettings)
    runtime: RuntimeSettings = Field(default_factory=RuntimeSettings)
    ingest: IngestSettings = Field(default_factory=IngestSettings)
    matcher: MatcherSettings = Field(default_factory=MatcherSettings)
    router: RouterSettings = Field(default_factory=RouterSettings)
    coordinator: CoordinatorSettings = Field(default_factory=CoordinatorSettings)

    @model_validator(mode="after")
    def _hears_before_it_doubts(self) -> Self:
        stale_after, repeated = self.router.stale_after, self.nats.stream_state_ttl
        if stale_after < repeated:
            raise ValueError(
                f"router.stale_after {stale_after} is below nats.stream_state_ttl {repeated}: publishers would be "
                "hidden between two words of ingest about them; raise the one or lower the other"
            )
        return self


def load_config(path: str | None = None, environment: dict[str, str] | None = None) -> Config:
    """Read the file (if any) and the environment. Raises ConfigError naming every wrong key at once."""
    variables = dict(os.environ if environment is None else environment)
    path = path or variables.get(FILE_VARIABLE) or None
    values = _read_file(path) if path else {}
    source = {".".join(key): f"environment variable {name}" for name, key in _merge_environment(values, variables)}
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, path, source)) from None


def _read_file(path: str) -> dict[str, Any]:
    try:
        size = Path(path).stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: {size} bytes are too many for a configuration, at most {MAX_FILE_BYTES}")
        document = yaml.load(Path(path).read_text(encoding="utf-8"), _UniqueKeys)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except DuplicateKeyError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must be a mapping of sections ({', '.join(Config.model_fields)})")
    for section, content in list(document.items()):
        if content is None:
            document[section] = {}
    return document


def _merge_environment(values: dict[str, Any], variables: dict[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    merged = []
    for name in sorted(variables):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in _SHELL_VARIABLES:
            continue
        if "__" not in name and _SERVICE_LINK.search(name):
            continue
        key = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
        target = values
        for part in key[:-1]:
            nested = target.setdefault(part, {})
            if not isinstance(nested, dict):
                raise ConfigError(f"environment variable {name}: {part} is not a section in the file")
            target = nested
        target[key[-1]] = _environment_value(key, variables[name])
        merged.append((name, key))
    return merged


def _environment_value(key: tuple[str, ...], text: str) -> Any:
    """Text as it is, except where the field is a list or a mapping, which is written as YAML."""
    model: Any = Config
    for part in key:
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, BaseModel) else None
        if field is None:
            return text
        model = field.annotation
    kinds = get_args(model) if get_origin(model) in (Union, types.UnionType) else (model,)
    if text == "" and type(None) in kinds:
        return None
    if any((get_origin(kind) or kind) in (list, tuple, dict) for kind in kinds):
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text
    return text


def _explain(error: ValidationError, path: str | None, source: dict[str, str]) -> str:
    lines = []
    for item in error.errors(include_url=False, include_input=False):
        location = tuple(str(part) for part in item["loc"])
        dotted = ".".join(location)
        where = source.get(dotted) or path or "configuration"
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown key {dotted}{_suggestion(location)}")
        else:
            lines.append(f"{where}: {dotted + ': ' if dotted else ''}{_in_words(item['type'], item['msg'])}")
    return "\n".join(lines)


def _in_words(kind: str, message: str) -> str:
    if kind == "model_type":
        return "must be a mapping of keys and values"
    return message.removeprefix("Value error, ")


def _suggestion(location: tuple[str, ...]) -> str:
    model: Any = Config
    for part in location[:-1]:
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, BaseModel) else None
        model = field.annotation if field else None
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return ""
    known = list(model.model_fields)
    word = location[-1]
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in word)
    close = difflib.get_close_matches(snake, known, n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}"
