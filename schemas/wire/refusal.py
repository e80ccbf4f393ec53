"""The exception with which a codec's parts give up one event; it never leaves the codecs."""

from schemas.wire.types import RejectReason


class RefusedError(ValueError):
    """One event that cannot be used: the reason, and what to look at."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
