"""A run that is over in seconds and still learns: a tiny base whose logits can be moved, two tokens an answer, an easy reward.

    config = make_small_run(folder, tiny_base)       folder/{base/, prompts.jsonl, reward.py, grpod.yaml}

The reward is the share of tokens whose id is divisible by 4: a quarter at the start, more than half after 80 steps.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

NORM_SCALE = 10.0  # of the last norm: with its own weights no adapter could make any token likely
REWARD = """\
def fours(completion_ids, **columns):
    return [sum(token % 4 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""
CONFIG = """\
run:
  bucket: file://./run
  max_lag: 2
  startup_timeout_s: 120
model:
  base: base
  dtype: float32
  max_model_len: 64
lora:
  rank: 4
  alpha: 16
data:
  source: prompts.jsonl
rewards:
  - function: reward.py:fours
generator:
  group_size: 8
  reward_workers: 1
  state_every_s: 0.5
  sampling:
    max_new_tokens: 2
learner:
  steps: 40
  groups_per_step: 4
  learning_rate: 3.0e-2
  loss:
    mask_truncated: false  # no answer ends by itself
proxy:
  listen: 127.0.0.1:0
telemetry:
  log_format: json
"""


def make_small_run(folder: Path, tiny_base: Path) -> Path:
    """Returns the config's path."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(tiny_base, folder / "base")
    weights = folder / "base" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * NORM_SCALE
    save_file(tensors, weights, metadata={"format": "pt"})
    prompts = [{"prompt": f"{i}+{i}="} for i in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "reward.py").write_text(REWARD)
    config = folder / "grpod.yaml"
    config.write_text(CONFIG)
    return config
