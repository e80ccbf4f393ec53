"""Registrations that the configuration file keeps: written at start, put back when they are missing."""

import asyncio
from collections.abc import Mapping

from nats.errors import Error as NatsError

from schemas.registration import RegistrationError, parse_registration
from schemas.registry import EngineRecord, PoolRecord
from services.coordinator.settings import CoordinatorSettings
from services.runtime.health import Health
from services.runtime.logging import get_logger
from services.runtime.registrar import Registrar
from services.runtime.registration_rules import EndpointTakenError, KindTakenError, LiveRecord
from services.runtime.registry_store import Registry, key_of
from services.runtime.tasks import end_tasks

log = get_logger("static_registrations")

NOTE = "static_registrations"


def pool_model(settings: CoordinatorSettings, registry: Registry) -> tuple[str | None, str]:
    """The model that ``pool_endpoint`` is registered for, or why it is not known yet.

    The configured model, else the one that all registered engines of this backend serve.
    """
    if settings.model:
        return settings.model, ""
    models = sorted({e.model for e in registry.engines.values() if e.store_backend == settings.store_backend})
    if len(models) == 1:
        return models[0], ""
    if not models:
        return None, "pool_endpoint waits for the first engine, which tells the model (or set coordinator.model)"
    return None, f"engines serve {', '.join(models[:5])}: set coordinator.model to the one that pool_endpoint is for"


class StaticRegistrations:
    """Keeps ``coordinator.engines``, ``coordinator.pools`` and ``coordinator.pool_endpoint`` in the registry.

    pool_service: what a pool's wildcard stands for; without it such a pool is left out and said so.
    """

    def __init__(
        self, settings: CoordinatorSettings, registrar: Registrar, health: Health, pool_service: str | None
    ) -> None:
        self._settings = settings
        self._registrar = registrar
        self._health = health
        self._pool_service = pool_service
        self._said: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to keep them."""
        self._task = asyncio.create_task(self._keep(), name="static-registrations")

    async def stop(self) -> None:
        """Stop keeping; the registrations stay."""
        if self._task is not None:
            await end_tasks([self._task])

    async def _keep(self) -> None:
        first = True
        while True:
            try:
                await self.apply(only_missing=not first)
                first = False
            except (NatsError, TimeoutError) as error:
                log.info("static_registrations_wait", error=str(error) or type(error).__name__)
            await asyncio.sleep(self._settings.keep_interval)

    async def apply(self, only_missing: bool) -> None:
        """Write what is missing, or everything that differs. What an earlier file kept and this one does not, goes."""
        registry = await self._registrar.fresh_view()
        live: list[LiveRecord] = [*registry.engines.values(), *registry.pools.values()]
        present = {key_of(record): record for record in live}
        wanted = self._wanted(registry)
        if not only_missing:
            await self._remove_what_the_file_dropped(present, wanted)
        for key, record in wanted.items():
            if only_missing and key in present:
                continue
            try:
                await self._registrar.put(record)
            except (EndpointTakenError, KindTakenError) as error:
                self._say(key, f"{record.instance_id}: {error}")
            else:
                self._said.pop(key, None)
        self._health.note(NOTE, "; ".join(self._said.values()))

    def _wanted(self, registry: Registry) -> dict[str, LiveRecord]:
        bodies = [*self._settings.static_bodies("engines"), *self._settings.static_bodies("pools")]
        if self._settings.pool_endpoint:
            model, reason = pool_model(self._settings, registry)
            body = self._settings.pool_body(model) if model else None
            if body is not None:
                bodies.append(body)
                self._said.pop("pool_endpoint", None)
            else:
                self._say("pool_endpoint", reason)
        wanted: dict[str, LiveRecord] = {}
        for body in bodies:
            try:
                record = parse_registration(body, self._pool_service).record
            except RegistrationError as error:
                self._say(str(body.get("instance_id")), f"{body.get('instance_id')} is left out: {error}")
                continue
            wanted[key_of(record)] = record.model_copy(update={"origin": "config"})
        return wanted

    async def _remove_what_the_file_dropped(
        self, present: Mapping[str, LiveRecord], wanted: Mapping[str, LiveRecord]
    ) -> None:
        pool_not_known_yet = "pool_endpoint" in self._said
        for key, record in present.items():
            if record.origin != "config" or key in wanted or (pool_not_known_yet and isinstance(record, PoolRecord)):
                continue
            ranks = [record.dp_rank] if isinstance(record, EngineRecord) else []
            await self._registrar.remove(record.instance_id, ranks)

    def _say(self, key: str, text: str) -> None:
        if self._said.get(key) != text:
            log.warning("static_registration", problem=text)
            self._said[key] = text
