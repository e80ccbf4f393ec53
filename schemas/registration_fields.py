"""Reading typed, bounded fields out of a registration request, with every problem collected (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from schemas.addresses import AddressError, TcpEndpoint, canonical_host, parse_tcp
from schemas.registry import MAX_NAME, RegistrationDialect
from schemas.subjects import escape

MAX_LIST = 64


class FieldProblem(NamedTuple):
    """One thing wrong with a request: which field, what about it, what to write instead."""

    field: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.fix}"


class RegistrationError(ValueError):
    """A request that cannot be carried out, with all its problems."""

    def __init__(self, problems: Sequence[FieldProblem]) -> None:
        super().__init__(" | ".join(map(str, problems)))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class CommonFields:
    """What engines and pools have in common. backend_given: whether the body named a store_backend."""

    instance_id: str
    model: str
    tenant: str
    block_size: int
    dp_rank: int
    engine_type: str
    backend: str
    backend_given: bool

    def values(self, dialect: RegistrationDialect) -> dict[str, Any]:
        """Keyword arguments of a record."""
        return {
            "instance_id": self.instance_id,
            "model": self.model,
            "tenant": self.tenant,
            "block_size": self.block_size,
            "dp_rank": self.dp_rank,
            "engine_type": self.engine_type,
            "store_backend": self.backend,
            "registered_with": dialect,
        }


class Fields:
    """Reads typed fields out of a body and collects what is wrong with them."""

    def __init__(self, body: object) -> None:
        if not isinstance(body, Mapping):
            raise RegistrationError([FieldProblem("body", "is not an object", "send a JSON object")])
        self.body: Mapping[Any, Any] = body
        self.problems: list[FieldProblem] = []
        self.warnings: list[str] = []

    def refuse(self, field: str, problem: str, fix: str) -> None:
        """Note a problem; reading goes on."""
        self.problems.append(FieldProblem(field, problem, fix))

    def finish(self) -> None:
        """Raise RegistrationError when there were problems."""
        if self.problems:
            raise RegistrationError(list(dict.fromkeys(self.problems)))

    def given(self, *names: str) -> tuple[str, Any]:
        """The first of these fields that is present and not null, with its value."""
        return next(((name, self.body[name]) for name in names if self.body.get(name) is not None), (names[0], None))

    def text(self, *names: str) -> str:
        """Text without surrounding blanks, empty when absent."""
        field, value = self.given(*names)
        if value is None:
            return ""
        if not isinstance(value, str):
            self.refuse(field, f"must be text, not {_type_name(value)}", "send a JSON string")
            return ""
        return value.strip()

    def name(self, *names: str, required: bool = False) -> str:
        """Text that becomes part of keys and subjects: bounded, printable."""
        field, value = self.given(*names)
        text = self.text(*names)
        if not text:
            if required and (value is None or isinstance(value, str)):
                problem = "is missing" if value is None else "is empty"
                self.refuse(field, problem, "every registration needs it")
            return ""
        if not text.isprintable():
            self.refuse(field, "contains control characters", "send printable text")
        elif len(escape(text)) > MAX_NAME:
            self.refuse(field, f"is too long ({len(escape(text))} as a key)", f"use at most {MAX_NAME} characters")
        return text

    def integer(self, field: str, low: int, high: int) -> int:
        """A required whole number; ``low`` stands in for a refused one."""
        value = self.body.get(field)
        if value is None:
            self.refuse(field, "is missing", f"send a whole number from {low} to {high}")
        elif isinstance(value, bool) or not isinstance(value, int):
            self.refuse(field, f"must be a whole number, not {_type_name(value)}", f"send one from {low} to {high}")
        elif not low <= value <= high:
            self.refuse(field, "is out of range", f"send a whole number from {low} to {high}")
        else:
            return value
        return low

    def flag(self, field: str) -> bool | None:
        """A boolean, None when absent."""
        value = self.body.get(field)
        if value is None or isinstance(value, bool):
            return value
        self.refuse(field, f"must be true or false, not {_type_name(value)}", "send a JSON boolean")
        return None

    def texts(self, field: str) -> tuple[str, ...] | None:
        """A bounded list of text, None when absent."""
        value = self.body.get(field)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item.strip() for item in value):
            self.refuse(field, "must be a list of text", 'send for example ["10.0.0.5"]')
            return None
        if len(value) > MAX_LIST or any(len(item) > MAX_NAME for item in value):
            self.refuse(field, "is too large", f"send at most {MAX_LIST} entries of at most {MAX_NAME} characters")
            return None
        return tuple(item.strip() for item in value)

    def host(self, field: str) -> str | None:
        """A host that can be connected to, None when absent or refused."""
        text = self.text(field)
        if not text:
            return None
        try:
            host = canonical_host(text)
        except AddressError as error:
            self.refuse(field, str(error), error.fix)
            return None
        if host == "*":
            self.refuse(field, f"{text!r} is an address to listen on", "give the address to connect to")
            return None
        return host

    def tcp(self, field: str, url: object) -> TcpEndpoint | None:
        """A ZMQ address, wildcard or not; None when refused."""
        if not isinstance(url, str):
            self.refuse(field, f"must be text, not {_type_name(url)}", "write tcp://host:port")
            return None
        try:
            return parse_tcp(url)
        except AddressError as error:
            self.refuse(field, str(error), error.fix)
            return None


def _type_name(value: object) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
