"""The engine half of a registration: publishers by tier, wildcards resolved, what is local to the instance (pure)."""

from collections.abc import Mapping
from typing import Any

from schemas.addresses import MAX_PORT, AddressError, TcpEndpoint, canonical_host, parse_http, parse_tcp
from schemas.blocks import Tier, tier_of_medium
from schemas.registration_fields import MAX_LIST, CommonFields, Fields
from schemas.registry import EngineRecord, RegistrationDialect, StoreBackend

ROLES = {
    **dict.fromkeys(("prefill", "p"), "prefill"),
    **dict.fromkeys(("decode", "d"), "decode"),
    **dict.fromkeys(("encode", "e"), "encode"),
    **dict.fromkeys(("union", "u", "both", "hybrid"), "union"),
}


def read_engine(fields: Fields, common: CommonFields, dialect: RegistrationDialect) -> EngineRecord | None:
    """The engine record of a body, None when there were problems."""
    places = _places(fields)
    replay_url = fields.body.get("replay_endpoint") or None
    replay = fields.tcp("replay_endpoint", replay_url) if replay_url is not None else None
    host = fields.host("host") or _host_of_another(fields, places, replay)
    endpoints: dict[Tier, str] = {}
    hosts: dict[Tier, str] = {}
    for tier, (field, place) in places.items():
        # Offload workers are one process per node, so their ports do not move with the rank.
        target = _connectable(fields, field, place, host, common.dp_rank if tier is Tier.NPU else 0)
        if target is not None:
            endpoints[tier], hosts[tier] = target.url(), target.host
    replay_target = None
    if replay is not None:
        replay_target = _connectable(fields, "replay_endpoint", replay, host, common.dp_rank)
    node_id = fields.name("node_id") or None
    local_host = hosts.get(Tier.NPU) or host or next(iter(hosts.values()), None)
    extras: dict[str, Any] = {
        "own_tiers": _own_tiers(fields, common),
        "backend_ids": _backend_ids(fields, local_host, node_id),
        "url": _http_url(fields, host),
        "lora_name": fields.name("lora_name") or None,
        "additional_salt": fields.name("additionalsalt", "additional_salt") or None,
        "node_id": node_id,
        "role": _role(fields),
    }
    if (counted := fields.flag("counted")) is not None:
        extras["counted"] = counted
    if fields.problems:
        return None
    return EngineRecord(
        **common.values(dialect),
        endpoints=endpoints,
        replay_endpoint=replay_target.url() if replay_target else None,
        **extras,
    )


def _places(fields: Fields) -> dict[Tier, tuple[str, TcpEndpoint]]:
    """The publishers a body names, by tier, with the field each came from; wildcards not yet resolved."""
    media = fields.body.get("medium_endpoints")
    if media is not None and (not isinstance(media, Mapping) or len(media) > MAX_LIST):
        fields.refuse("medium_endpoints", "must be an object of medium and URL", 'send {"npu": "tcp://host:port"}')
        return {}
    places: dict[Tier, tuple[str, TcpEndpoint]] = {}
    for medium, url in (media or {}).items():
        field = f"medium_endpoints.{str(medium)[:40]}"
        tier = tier_of_medium(medium) if isinstance(medium, str) else None
        if tier is None:
            fields.refuse(field, "is not a medium", "use npu, cpu or disk")
            continue
        place = fields.tcp(field, url)
        if place is None:
            continue
        if tier in places and places[tier][1] != place:
            fields.refuse(field, f"{tier} has two different publishers", "give one URL for each of npu, cpu and disk")
            continue
        places[tier] = (field, place)
    if media:
        if fields.body.get("endpoint"):
            fields.warnings.append("endpoint is ignored beside medium_endpoints")
        return places
    url = fields.body.get("endpoint")
    if url is not None:
        place = fields.tcp("endpoint", url)
        return {Tier.NPU: ("endpoint", place)} if place is not None else {}
    if fields.body.get("port") is not None:
        port = fields.integer("port", 1, MAX_PORT)
        if not fields.body.get("host"):
            fields.refuse("host", "is missing", "a port alone names no publisher; give its host too")
        return {Tier.NPU: ("port", TcpEndpoint("*", port))}
    return {}


def _host_of_another(
    fields: Fields, places: Mapping[Tier, tuple[str, TcpEndpoint]], replay: TcpEndpoint | None
) -> str | None:
    """The instance's host as its other addresses tell it."""
    known = [place for _, place in places.values()] + ([replay] if replay else [])
    for place in known:
        if not place.wildcard:
            return place.host
    url = fields.body.get("url")
    if isinstance(url, str):
        try:
            return parse_tcp(f"tcp://{parse_http(url).split('://', 1)[1].split('/', 1)[0]}").host
        except AddressError:
            return None
    return None


def _connectable(fields: Fields, field: str, place: TcpEndpoint, host: str | None, offset: int) -> TcpEndpoint | None:
    """A place that can be connected to: a wildcard becomes the instance's host, its port moved by the rank."""
    if not place.wildcard:
        return place
    if fields.body.get("host") and host is None:
        return None  # the host itself was refused
    if host is None:
        fields.refuse(
            field,
            f"{place.url()!r} is an address to listen on, and nothing tells the instance's host",
            "write the instance's address instead, or send it as host",
        )
        return None
    port = place.port + offset
    if port > MAX_PORT:
        fields.refuse(field, f"port {place.port} + rank {offset} is above {MAX_PORT}", "use lower ports")
        return None
    return TcpEndpoint(host, port)


def _own_tiers(fields: Fields, common: CommonFields) -> tuple[Tier, ...]:
    named = fields.texts("own_tiers")
    offload = fields.flag("offload")
    if named is not None:
        tiers = {tier_of_medium(name) for name in named}
        if None in tiers or Tier.NPU in tiers:
            fields.refuse("own_tiers", f"{list(named)[:5]} has more than cpu and disk", 'send for example ["cpu"]')
            return ()
        return tuple(tier for tier in Tier if tier in tiers)
    if offload is None:
        offload = common.backend == StoreBackend.NONE
    return (Tier.CPU,) if offload else ()


def _backend_ids(fields: Fields, host: str | None, node_id: str | None) -> tuple[str, ...]:
    named = fields.texts("backend_ids")
    if named is None:
        named = tuple(name for name in (host, node_id) if name)
    return tuple(dict.fromkeys(canonical_backend_id(name) for name in named))


def _http_url(fields: Fields, host: str | None) -> str | None:
    url = fields.text("url")
    if not url:
        return None
    try:
        return parse_http(url, host)
    except AddressError as error:
        fields.refuse("url", str(error), error.fix)
        return None


def _role(fields: Fields) -> str | None:
    role = fields.text("role").lower()
    if not role:
        return None
    if role not in ROLES:
        fields.refuse("role", f"{role[:40]!r} is not known", "use prefill, decode, union or encode")
    return ROLES.get(role)


def canonical_backend_id(backend_id: str) -> str:
    """One spelling for a pool location: an IP address in its canonical form, any other name as it is."""
    text = backend_id.strip()
    if ":" not in text and not text.replace(".", "").isdigit():
        return text
    try:
        return canonical_host(text)
    except AddressError:
        return text
