"""Is an adapter's config the plain LoRA that its manifest tells of? Pure.

Of a field that scales, replaces or leaves out single modules, engines make different things: one applies it, another drops it
and answers 200. A learner of grpod writes none of them, so a config that has one is not the config that was trained with.
"""

from __future__ import annotations

import json

from grpod.wire.adapter import Lora

_BEYOND = (
    "alpha_pattern",
    "rank_pattern",
    "use_rslora",
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "layer_replication",
    "layers_to_transform",
    "alora_invocation_tokens",
    "trainable_token_indices",
)


def beyond(config: bytes, lora: Lora) -> list[str]:
    """What it asks for beside `lora`, as field: value; empty when it is plain."""
    try:
        fields = json.loads(config)
    except ValueError as error:
        return [f"no JSON: {error}"]
    if not isinstance(fields, dict):
        return [f"no JSON object: {fields!r:.80}"]
    wrong = {name: fields[name] for name in _BEYOND if fields.get(name)}
    wrong |= {
        name: fields[name] for name, right in (("r", lora.r), ("lora_alpha", lora.alpha)) if fields.get(name, right) != right
    }
    if fields.get("bias", "none") != "none":
        wrong["bias"] = fields["bias"]
    return [f"{name}: {value!r:.200}" for name, value in wrong.items()]
