"""Is a folder a mounted bucket? There, `link` and O_EXCL hold on one machine only, and `fsync` returns before the upload."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

MOUNTS: Path = Path("/proc/mounts")
BUCKET_MOUNT: Final = "hf-mount"


def on_bucket_mount(folder: Path) -> bool:
    try:
        table = MOUNTS.read_text(errors="surrogateescape")
    except FileNotFoundError:  # not Linux: nothing is known, and hf-mount does not run there
        return False
    return any(BUCKET_MOUNT in word for word in mount_of(folder.resolve(), table))


def mount_of(folder: Path, table: str) -> tuple[str, str]:
    """(source, type) of the mount that holds `folder`, from the text of /proc/mounts: of equal mount points the last holds."""
    best = ("", "")
    length = -1
    for line in table.splitlines():
        fields = [re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), field) for field in line.split(" ")]
        if len(fields) >= 3 and folder.is_relative_to(fields[1]) and len(fields[1]) >= length:
            best, length = (fields[0], fields[2]), len(fields[1])
    return best
