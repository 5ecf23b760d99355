"""grpod with a bucket that needs 2 s more for every put, as one far away does: python -m tests.integration.slow_grpod …"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import anyio

from grpod.__main__ import main
from grpod.bucket.file import FileBucket

DELAY_S = 2.0
put = FileBucket.put


async def slow_put(self: FileBucket, items: Mapping[str, bytes | Path], *, create: bool = False) -> None:
    await anyio.sleep(DELAY_S)
    await put(self, items, create=create)


if __name__ == "__main__":
    FileBucket.put = slow_put  # type: ignore[method-assign]
    main()
