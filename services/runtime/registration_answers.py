"""The answers of the registration API: status and body."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from schemas.registration import FieldProblem
from services.runtime.logging import get_logger

log = get_logger("registrar")


@dataclass(frozen=True, slots=True)
class Answer:
    """What an HTTP caller gets: status and JSON body."""

    status: int
    body: dict[str, Any]


def refused(problems: Iterable[FieldProblem]) -> Answer:
    """422 with every problem of a body."""
    found = [problem._asdict() for problem in problems]
    text = "; ".join(f"{item['field']}: {item['problem']}" for item in found)
    return Answer(422, {"error": text, "code": "invalid_registration", "problems": found})


def conflict(code: str, problem: FieldProblem) -> Answer:
    """409."""
    return Answer(409, {"error": f"{problem.problem}; {problem.fix}", "code": code, "problems": [problem._asdict()]})


def not_found(instance_id: str) -> Answer:
    """404 in the words that callers know."""
    return Answer(404, {"error": f"instance {instance_id[:512]} not found"})


def unreachable(error: Exception) -> Answer:
    """503: the registry cannot be reached now; nothing was changed that the caller was not told of."""
    log.warning("registry_unreachable", error=str(error) or type(error).__name__)
    return Answer(503, {"error": "the registry (NATS) cannot be reached, try again", "code": "registry_unreachable"})


def starting() -> Answer:
    """503 of a process that has not reached the registry yet."""
    return Answer(503, {"error": "starting: the registry (NATS) is not reached yet, try again", "code": "starting"})
