"""Settings ``coordinator.liveness``."""

from pydantic import BaseModel, ConfigDict, Field


class LivenessSettings(BaseModel):
    """How engines are asked whether they live. Times in seconds.

    An engine counts as dead after ``failures`` checks in a row without success, so after about
    failures x (interval + timeout) at the latest, and as alive again after one that succeeds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    enabled: bool = Field(True, description="ask at all; engines without a url are never asked")
    path: str = Field("/health", pattern=r"^/", description="what is asked of an engine's url")
    interval: float = Field(2.0, gt=0, description="between two checks of one engine")
    timeout: float = Field(1.0, gt=0, description="after which a check has failed")
    failures: int = Field(3, ge=1, description="failed checks in a row after which an engine is dead")
    sleep_interval: float = Field(
        5.0, ge=0, description="how often /metrics is read for engines that sleep (vLLM), 0 for never"
    )
    repeat_interval: float = Field(5.0, gt=0, description="how often it is said again that an engine is not alive")
    lease_ttl: float = Field(6.0, gt=0.2, description="how soon another coordinator takes over the checks")
    concurrency: int = Field(64, ge=1, le=4096, description="checks at the same time")
