"""Errors a harness can be answered with, in OpenAI's shape."""

from __future__ import annotations

from typing import Any


class CallError(Exception):
    """A call that is answered with an HTTP error.

    `error_class` is that of ModelCallFailed: bad_request | context_length | engine_error | client_disconnected |
    timeout | overloaded. `param` names the field at fault.
    """

    def __init__(
        self, status: int, error_class: str, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error_class = error_class
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error object of the OpenAI API."""
        return openai_error(self.status, self.message, self.param, self.code)


def bad_request(message: str, param: str | None = None) -> CallError:
    """400 for a request that is not understood."""
    return CallError(400, "bad_request", message, param=param)


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
}


def openai_error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body that OpenAI clients parse."""
    return {"error": {"message": message, "type": _TYPES.get(status, "server_error"), "param": param, "code": code}}
