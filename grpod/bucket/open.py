"""URL -> bucket, and the one rule of what a run's folder may be called: the same on every backend, so that a run can move.

    memory://name                    in the process, for tests
    file:///abs/path   /abs/path     a folder
    file://./path      path          relative to the config's folder

What no backend would keep as it is (a space, '#', 'é', '..', an empty segment, …) is refused by all of them, by name. Of a
`file://` URL only the last segment is the run's own: those above it are the machine's, and may hold a space or an 'é'.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from grpod.bucket.base import Bucket
from grpod.bucket.file import FileBucket
from grpod.bucket.memory import MemoryBucket
from grpod.errors import ConfigError

SCHEMES: Final = ("memory", "file")
PLANNED: Final = ("hf", "s3", "gs", "az")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?(.*)", re.DOTALL)
_NEVER = re.compile(r"[%?#\\\x00-\x1f\x7f\ud800-\udfff]")  # would be read in two ways, or in none
_OWN = re.compile(r"[^A-Za-z0-9._=+@-]")
_MAX_SEGMENT: Final = 200


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    scheme: str
    segments: tuple[str, ...]
    absolute: bool = True  # file only: False is relative to the config's folder

    @property
    def path(self) -> str:
        return ("/" if self.absolute else "") + "/".join(self.segments)


def open_bucket(url: str, *, folder: Path = Path(), create: bool = True) -> Bucket:
    """`folder`: of the config file. Raises `ConfigError`, and `BucketError` when the folder cannot be made."""
    run = run_folder(url)
    if run.scheme == "memory":
        return MemoryBucket(f"memory://{'/'.join(run.segments)}")
    if run.scheme == "file":
        return FileBucket(folder / run.path, create=create)  # an absolute path stays what it is
    raise ConfigError(
        f"bucket URL {url!r}: {run.scheme}:// is not in this build yet; it has {', '.join(f'{s}://' for s in SCHEMES)}"
    )


def run_folder(url: str) -> RunFolder:
    """The rule. One trailing '/' is no difference."""
    if not url:
        raise ConfigError(f"run.bucket is not set; it is a URL: {_known()}")
    match = _URL.fullmatch(url)
    scheme, rest = (match[1].lower(), match[3]) if match else ("file", str(Path(url).expanduser()) if url[0] == "~" else url)
    if scheme not in SCHEMES + PLANNED:
        raise ConfigError(f"bucket URL {url!r}: unknown scheme {scheme!r}; known are {_known()}")
    if match and not match[2]:
        raise ConfigError(f"bucket URL {url!r}: '//' must follow '{scheme}:'")
    absolute = True
    if scheme == "file":
        if match and not rest.startswith(("/", "./")):
            raise ConfigError(
                f"bucket URL {url!r}: write file:///… for an absolute path, file://./… for one relative to the config"
            )
        absolute = rest.startswith("/")
        rest = rest.removeprefix("/" if absolute else "./")
    segments = tuple(rest.removesuffix("/").split("/")) if rest.removesuffix("/") else ()
    if not segments and scheme != "memory":
        raise ConfigError(f"bucket URL {url!r}: a folder must follow")
    for i, segment in enumerate(segments):
        if (problem := _problem(segment, own=scheme != "file" or i == len(segments) - 1)) is not None:
            raise ConfigError(f"bucket URL {url!r}: {problem}")
    return RunFolder(scheme=scheme, segments=segments, absolute=absolute)


def _problem(segment: str, *, own: bool) -> str | None:
    if segment == "":
        return "an empty segment ('//') in the path"
    if segment in (".", ".."):
        return f"the segment {segment!r} in the path; write the path without it"
    if len(segment.encode("utf-8", "surrogatepass")) > _MAX_SEGMENT:
        return f"a segment of {len(segment)} characters; at most {_MAX_SEGMENT} are possible"
    if (found := (_NEVER.search(segment) or (_OWN.search(segment) if own else None))) is not None:
        char = found[0]
        return f"the character {char!r} (U+{ord(char):04X}) in {segment!r}; a run's folder may have A-Z a-z 0-9 . _ = + @ -"
    if own and segment[0] in ".=+@-":
        return f"the character {segment[0]!r} at the start of {segment!r}; a run's folder begins with a letter, a digit or '_'"
    return None


def _known() -> str:
    return ", ".join(f"{scheme}://" for scheme in SCHEMES + PLANNED)
