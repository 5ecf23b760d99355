"""A server-sent stream on its way through: watched, renamed where an adapter has another name upstream, otherwise untouched."""

from __future__ import annotations

import re

import aiohttp

_ERROR = re.compile(rb'data:\s*\{\s*"error"')
_DONE = re.compile(rb"data:\s*\[DONE\]\s*")


class Relay:
    """Fed with chunks as they come, gives what goes on. Holds back part of a line only when it has to rename."""

    def __init__(self, *, upstream_name: str, name: str) -> None:
        self.done = False
        """[DONE] has passed: the stream is whole"""
        self.error = False
        """an error event has passed"""
        self._names = upstream_name.encode(), name.encode()  # neither needs escapes in JSON (`app.ADAPTER_NAME`)
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self.done = self.done or _DONE.fullmatch(line) is not None
            self.error = self.error or _ERROR.match(line) is not None
        if self._names[0] == self._names[1]:
            return chunk
        return b"".join(self._renamed(line) + b"\n" for line in lines)

    def end(self) -> bytes:
        """What was held back."""
        self.done = self.done or _DONE.fullmatch(self._rest) is not None
        return b"" if self._names[0] == self._names[1] else self._renamed(self._rest)

    def _renamed(self, line: bytes) -> bytes:
        for gap in (b"", b" "):
            there, here = (b'"model":%b"%b"' % (gap, name) for name in self._names)
            line = line.replace(there, here)
        return line


async def first_event(content: aiohttp.StreamReader) -> bytes:
    """The bytes up to the chunk with which the first event is whole; fewer (without one) when the stream ended before."""
    data = b""
    while _event_in(data) is None:
        chunk = await content.readany()
        if not chunk:
            break
        data += chunk
    return data


def is_error(data: bytes) -> bool:
    event = _event_in(data)
    return event is None or _ERROR.match(event) is not None


def _event_in(data: bytes) -> bytes | None:
    """The first whole data line: comments and other fields before it are no event."""
    lines = data.split(b"\n")[:-1]
    return next((line for line in lines if line.startswith(b"data:")), None)
