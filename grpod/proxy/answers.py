"""What goes back to a client, and what of a message never crosses the proxy."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web
from multidict import CIMultiDict

# RFC 9110, 7.6.1, and what older software treats the same way
HOP_BY_HOP = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ]
)


def end_to_end(headers: Mapping[str, str], *, without: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """The headers that are meant for the other end: no hop-by-hop ones, none that `Connection` names, none of `without`."""
    named = {
        token.strip().lower() for name, value in headers.items() if name.lower() == "connection" for token in value.split(",")
    }
    drop = HOP_BY_HOP | named | without
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in drop)


def problem(status: int, message: str, *, kind: str = "", headers: Mapping[str, str] | None = None) -> web.Response:
    """An error in the shape that clients of vLLM and OpenAI read."""
    kind = kind or {401: "Unauthorized", 404: "NotFoundError"}.get(status, "BadRequestError" if status < 500 else "ProxyError")
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status, headers=headers)
