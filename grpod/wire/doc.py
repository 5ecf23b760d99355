"""The rule of every JSON document that crosses the bucket: `format` is "major.minor".

A reader refuses another major with `WireError("format")`, ignores fields that it does not know, and refuses the rest
that does not fit with `WireError("malformed")`. Documents are frozen; `encode` is what stands in the object.
"""

from __future__ import annotations

import json
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from grpod.errors import WireError

FORMAT = "1.0"


def check_format(found: object, what: str) -> None:
    major = FORMAT.partition(".")[0]
    if not isinstance(found, str) or found.partition(".")[0] != major:
        raise WireError("format", f"{what}: format {found!r} is not {major}.x; another grpod wrote it")


class Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format: str = FORMAT

    def encode(self) -> bytes:
        return (self.model_dump_json(indent=1) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes, what: str) -> Self:
        """`what` names the object in the message: its key."""
        try:
            raw = json.loads(data)
        except (ValueError, RecursionError) as error:  # RecursionError: nested beyond all reason
            raise WireError("malformed", f"{what}: not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise WireError("malformed", f"{what}: a JSON object was expected, not {type(raw).__name__}")
        check_format(raw.get("format"), what)
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise WireError("malformed", f"{what}: {where}: {first['msg']}") from error
