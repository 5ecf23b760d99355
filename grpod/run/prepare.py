"""`model.prepare` in a process of its own: what it imports (torch, most often) stays out of grpod, and a signal can end it.

    python -P prepare.py FILE FUNCTION FOLDER SYS_PATH      calls FUNCTION(FOLDER); its lines go to grpod's own output

Imports the standard library alone. Ends when its standard input closes: it never outlives grpod, however that dies.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from pathlib import Path


def main(file: str, function: str, folder: str, path: str) -> int:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path[:] = [str(Path(file).parent), *json.loads(path)]
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        print(f"{file} has no function {function!r}", file=sys.stderr)
        return 2
    getattr(module, function)(Path(folder))
    return 0


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing is ever written: it returns when the other end is gone
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
