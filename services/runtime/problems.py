"""RFC 9457 problem details with a stable code, for paths, methods and faults that no route answers for."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

_CODES = {404: "unknown_path", 405: "method_not_allowed", 500: "internal_error"}


async def problem(request: Request, error: Exception) -> Response:
    """The answer for a request that no route took, or whose route failed (that is in the log)."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    title = error.detail if isinstance(error, HTTPException) else "Internal Server Error"
    detail = "the service's log says more" if status == 500 else "see the documentation of the HTTP API"
    body = {"type": "about:blank", "title": title, "status": status, "code": _CODES.get(status, "http_error")}
    headers = error.headers if isinstance(error, HTTPException) else None
    return JSONResponse(body | {"detail": detail}, status, headers=headers, media_type="application/problem+json")


PROBLEM_HANDLERS = {HTTPException: problem, Exception: problem}
