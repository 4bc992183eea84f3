"""Errors of the emulated engine, with vLLM's texts and shape."""

import orjson

from balanceroute.errors import InvalidRequest

# vLLM names the error after the status, except where a schema check failed before its own code ran
_KINDS = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
INTERNAL = "Internal server error"


class ApiError(InvalidRequest):
    """A reply with vLLM's error body `{"error": {message, type, param, code}}`."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, kind: str | None = None) -> None:
        super().__init__(message, status=status, param=param)
        self.kind = kind or _KINDS.get(status, "BadRequestError")

    def body(self) -> bytes:
        """The JSON body."""
        return error_body(str(self), self.kind, self.param, self.status)


def error_body(message: str, kind: str = "InternalServerError", param: str | None = None, code: int = 500) -> bytes:
    """An error object as vLLM sends it, as a body or inside an SSE event."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def bad_value(message: str, param: str, value: object) -> ApiError:
    """A value that vLLM's own checks refuse; they append parameter and value to the text."""
    return ApiError(f"{message} (parameter={param}, value={value})", param=param)


def bad_type(param: str, kind: str, message: str, value: object) -> ApiError:
    """A value of the wrong type, which the schema refuses."""
    detail = f"{{'type': '{kind}', 'loc': 'body.{param}', 'msg': '{message}', 'input': {value!r}}}"
    return ApiError(f"1 validation error:\n  {detail}", param=f"body.{param}", kind="Bad Request")
