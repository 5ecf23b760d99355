"""A bearer token in a file of the user's. Wrong at the start: ConfigError. Gone later, as in a rotation: the last one stays."""

from __future__ import annotations

from pathlib import Path

from grpod.config import Config, resolve
from grpod.errors import ConfigError
from grpod.telemetry.log import get_logger


class TokenFile:
    """Called for each request, so that a rotated token is seen. Without a path the token is None."""

    def __init__(self, key: str, path: str | None, folder: Path) -> None:
        """`key` of the config, for messages; `folder` of the config file."""
        self._key = key
        self._path = resolve(path, folder) if path else None
        self._failing = False
        try:
            self._last = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key} {self._path}: {error}") from error

    def __call__(self) -> str | None:
        try:
            self._last, self._failing = self._read(), False
        except (OSError, ValueError) as error:
            if not self._failing:
                get_logger().warning("token_unreadable", key=self._key, path=str(self._path), error=str(error))
            self._failing = True
        return self._last

    def _read(self) -> str | None:
        if self._path is None:
            return None
        token = self._path.read_text().strip()
        if not token:
            raise ValueError("it is empty")
        return token


def replica_token(config: Config, folder: Path) -> TokenFile:
    remote = config.generator.engine == "remote"
    return TokenFile("generator.remote.token_file", config.generator.remote.token_file if remote else None, folder)
