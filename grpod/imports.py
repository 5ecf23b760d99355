"""Large packages are imported by one thread at a time.

Roles start at once, each in a thread of its own, and two of them import transformers. It puts another object in its own place
while it is imported (its names are loaded when they are first asked for); a thread that meets it at that moment goes on with
the old one, in which the names are missing.
"""

from __future__ import annotations

import threading
from typing import Final

IMPORTING: Final = threading.RLock()
