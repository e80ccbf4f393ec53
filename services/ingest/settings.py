"""Settings of the ``ingest`` section."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class IngestSettings(BaseModel):
    """How ingest listens, batches and buffers. Times in seconds, sizes in bytes unless the name says otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = Field("::", description="address of the HTTP server (health, metrics, publishers)")
    port: int = Field(13331, ge=0, le=65535, description="port of the HTTP server, 0 for any free one")

    receive_high_water_mark: int = Field(
        100_000, ge=100, description="messages a socket queues before the publisher's are lost (ZMQ RCVHWM)"
    )
    max_message_bytes: int = Field(
        32 * 1024 * 1024, ge=1024, description="a larger ZMQ frame makes the connection drop (ZMQ MAXMSGSIZE)"
    )
    max_payload_bytes: int = Field(16 * 1024 * 1024, ge=1024, description="a larger payload is refused and counted")
    reconnect_min: float = Field(0.1, gt=0, description="first wait before a publisher is dialled again")
    reconnect_max: float = Field(5.0, gt=0, description="longest wait before a publisher is dialled again")
    max_publishers: int = Field(16_384, ge=1, le=20_000, description="sockets at most; more are refused and shown")

    linger: float = Field(0.002, ge=0, le=1, description="how long a publisher's messages are collected into one batch")
    max_batch_events: int = Field(4096, ge=1, le=65_536)
    max_batch_bytes: int = Field(512 * 1024, ge=4096, description="estimated body size at which a batch is closed")
    buffer_bytes_per_publisher: int = Field(
        32 * 1024 * 1024, ge=65_536, description="kept for a publisher while NATS is away; beyond it events are dropped"
    )
    buffer_bytes: int = Field(256 * 1024 * 1024, ge=65_536, description="kept for all publishers together")
    acknowledge_timeout: float = Field(5.0, gt=0, description="a publish without an acknowledgement is sent again")

    @model_validator(mode="after")
    def _waits_in_order(self) -> Self:
        if self.reconnect_min > self.reconnect_max:
            raise ValueError(f"reconnect_min {self.reconnect_min} is above reconnect_max {self.reconnect_max}")
        return self

    hold_messages: int = Field(20_000, ge=16, description="messages of a publisher that wait while a gap is repaired")
    hold_bytes: int = Field(16 * 1024 * 1024, ge=65_536, description="bytes of a publisher that wait meanwhile")
    replay_timeout: float = Field(
        2.0,
        gt=0,
        le=60,
        description="a replay that brings nothing for so long is over; what is missing is asked for again",
    )
    replay_attempts: int = Field(3, ge=1, le=20, description="replays without progress before a gap is given up")
    max_replays: int = Field(32, ge=1, le=1024, description="replays at a time; further publishers wait their turn")
    verify_interval: float = Field(
        10.0, ge=0.1, description="a publisher that was quiet for so long is asked whether its last message was heard"
    )
