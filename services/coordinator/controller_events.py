"""What a cluster controller tells the coordinator (``POST /instances/refresh``), as registry records (pure).

A message is ``{"event": "add" | "del" | "set" | "pause" | "resume", "instances": [...]}``. Prefill and union instances
become engines named ``vllm-prefill-<id>`` and ``vllm-union-<id>``, one record per endpoint. Decode and encode instances
are no targets: their hosts may hold pool blocks, and those need no registration (design: holders).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from schemas.addresses import AddressError, parse_tcp
from schemas.registration import RegistrationError, parse_registration
from schemas.registration_engine import ROLES
from schemas.registration_fields import FieldProblem
from schemas.registry import EngineRecord
from services.coordinator.settings import CoordinatorSettings

TARGET_ROLES = ("prefill", "union")
MAX_INSTANCES = 4096
MAX_ENDPOINTS = 1024


class EventKind(StrEnum):
    """What happened to the listed instances; ``set`` lists all there are."""

    ADD = "add"
    DEL = "del"
    SET = "set"
    PAUSE = "pause"
    RESUME = "resume"


@dataclass(slots=True)
class ControllerEvent:
    """engines: records by instance id; named: every target the message names, also those that were refused.

    not_targets: decode and encode instances. refused: instance and what is wrong with it.
    """

    kind: EventKind
    engines: dict[str, list[EngineRecord]] = field(default_factory=dict)
    named: list[str] = field(default_factory=list)
    not_targets: list[str] = field(default_factory=list)
    refused: dict[str, tuple[FieldProblem, ...]] = field(default_factory=dict)


def parse_controller_event(body: object, settings: CoordinatorSettings) -> ControllerEvent:
    """Read a message. A bad instance is refused alone; a message that is none raises RegistrationError."""
    if not isinstance(body, Mapping):
        raise RegistrationError([FieldProblem("body", "is not an object", "send event and instances")])
    try:
        event = ControllerEvent(EventKind(str(body.get("event", "")).lower()))
    except ValueError:
        kinds = ", ".join(EventKind)
        raise RegistrationError([FieldProblem("event", "is not known", f"send one of {kinds}")]) from None
    instances = body.get("instances")
    if not isinstance(instances, list) or not all(isinstance(instance, Mapping) for instance in instances):
        raise RegistrationError([FieldProblem("instances", "must be a list of objects", "send a JSON array")])
    if not instances and event.kind is not EventKind.SET:
        raise RegistrationError([FieldProblem("instances", "is empty", "name the instances")])
    if len(instances) > MAX_INSTANCES:
        raise RegistrationError([FieldProblem("instances", "is too long", f"send at most {MAX_INSTANCES}")])
    for position, instance in enumerate(instances):
        _read_instance(event, f"instances.{position}", instance, body, settings)
    return event


def _read_instance(
    event: ControllerEvent,
    place: str,
    instance: Mapping[Any, Any],
    body: Mapping[Any, Any],
    settings: CoordinatorSettings,
) -> None:
    number, role = instance.get("id"), ROLES.get(str(instance.get("role", "")).lower())
    if isinstance(number, bool) or not isinstance(number, int | str) or not str(number).strip():
        event.refused[place] = (FieldProblem(f"{place}.id", "is missing or no number", "send the instance's id"),)
        return
    if role is None:
        fix = "send prefill, decode, union or encode"
        event.refused[place] = (FieldProblem(f"{place}.role", "is missing or not known", fix),)
        return
    instance_id = f"vllm-{role}-{str(number).strip()}"
    if role not in TARGET_ROLES:
        event.not_targets.append(instance_id)
        return
    event.named.append(instance_id)
    if event.kind not in (EventKind.ADD, EventKind.SET):
        return
    records: list[EngineRecord] = []
    problems: list[FieldProblem] = []
    hosts = _node_hosts(instance)
    for ip, endpoint in _endpoints(instance):
        registration = _registration(instance_id, role, ip, endpoint, instance, body, hosts, settings)
        try:
            record = parse_registration(registration).record
        except RegistrationError as error:
            problems.extend(problem._replace(field=f"{place}.{problem.field}") for problem in error.problems)
        else:
            assert isinstance(record, EngineRecord)
            records.append(record.model_copy(update={"origin": "controller"}))
    if not records and not problems:
        problems.append(FieldProblem(f"{place}.endpoints", "is empty", "send one endpoint per DP rank"))
    if problems:
        event.refused[instance_id] = tuple(problems[:20])
    else:
        event.engines[instance_id] = records


def _endpoints(instance: Mapping[Any, Any]) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Address and endpoint, from ``{ip: {rank: endpoint}}`` or from ``[{"id", "address"}]``."""
    endpoints = instance.get("endpoints")
    found: list[tuple[str, Any]] = []
    if isinstance(endpoints, Mapping):
        for ip, by_rank in endpoints.items():
            found.extend((str(ip), item) for item in (by_rank.values() if isinstance(by_rank, Mapping) else ()))
    elif isinstance(endpoints, list):
        found.extend(("", item) for item in endpoints)
    for ip, endpoint in found[:MAX_ENDPOINTS]:
        if isinstance(endpoint, Mapping):
            yield str(endpoint.get("ip") or ip or _address(endpoint)[0]), endpoint


def _address(endpoint: Mapping[Any, Any]) -> tuple[str, str]:
    """Host and port of an endpoint's ``address``, empty when there is none that can be read."""
    try:
        place = parse_tcp(f"tcp://{endpoint.get('address', '')}")
    except AddressError:
        return "", ""
    return place.host, str(place.port)


def _node_hosts(instance: Mapping[Any, Any]) -> dict[str, str]:
    """Node address by Pod address, as far as the controller tells it."""
    managers = instance.get("node_managers")
    return {
        str(manager["pod_ip"]): str(manager["host_ip"])
        for manager in (managers if isinstance(managers, list) else ())
        if isinstance(manager, Mapping) and manager.get("pod_ip") and manager.get("host_ip")
    }


def _registration(
    instance_id: str,
    role: str,
    ip: str,
    endpoint: Mapping[Any, Any],
    instance: Mapping[Any, Any],
    body: Mapping[Any, Any],
    hosts: Mapping[str, str],
    settings: CoordinatorSettings,
) -> dict[str, Any]:
    """The ``POST /register`` body that an endpoint stands for."""
    media = {"npu": settings.npu_endpoint, "cpu": settings.cpu_endpoint, "disk": settings.disk_endpoint}
    registration: dict[str, Any] = {
        "instance_id": instance_id,
        "type": instance.get("engine_type") or body.get("engine_type") or settings.engine_type,
        "modelname": instance.get("model_name") or body.get("model_name") or settings.model,
        "block_size": settings.block_size,
        "dp_rank": endpoint.get("id"),
        "store_backend": settings.store_backend,
        "medium_endpoints": {medium: url for medium, url in media.items() if url},
        "host": ip,
        "role": role,
    }
    if settings.replay_endpoint:
        registration["replay_endpoint"] = settings.replay_endpoint
    if node := hosts.get(ip):
        registration["node_id"] = node
    port = endpoint.get("business_port") or _address(endpoint)[1]
    if port and not endpoint.get("headless"):
        registration["url"] = f"http://*:{port}"
    return registration
