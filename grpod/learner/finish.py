"""final/: the adapter for its users, and the manifest that ends the run. The manifest is written last."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from grpod.bucket.base import Bucket
from grpod.learner.versions import Version
from grpod.wire import keys
from grpod.wire.adapter import file_ref
from grpod.wire.run import Final, Run
from grpod.wire.tables import End, encode_ledger


async def write_final(
    bucket: Bucket,
    *,
    run: Run,
    epoch: int,
    step: int,
    version: Version | None,
    adapter: Mapping[str, bytes],
    segments: Sequence[str],
    ends: Sequence[End],
    reason: str,
) -> None:
    """`ends`: those that no segment holds yet."""
    assert version is not None
    listed = list(segments)
    if ends:
        last = keys.ledger(epoch, step + 1)  # a checkpoint of this very step has taken its number
        await bucket.put({last: encode_ledger(ends)})
        listed.append(last)
    readme = _README.format(run_id=run.run_id, step=step, version=version.version).encode()
    files = {**adapter, "README.md": readme}
    await bucket.put({f"{keys.FINAL}/{name}": data for name, data in files.items()})
    manifest = Final(
        run_id=run.run_id,
        epoch=epoch,
        step=step,
        version=version.version,
        base_fingerprint=run.base_fingerprint,
        files={name: file_ref(data) for name, data in files.items()},
        ledger=listed,
        reason=reason,
        created_at=time.time(),
    )
    await bucket.put({keys.FINAL_MANIFEST: manifest.encode()}, create=True)


_README = """\
---
library_name: peft
tags: [grpo, lora, grpod]
---
LoRA adapter of grpod run {run_id} after step {step} (policy version {version}).

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), FOLDER)
```
"""
