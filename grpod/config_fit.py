"""One layer of the config against the keys: what is unknown is a fault, what is plainly meant is made to fit.

    devices: 0,1          ["0", "1"]      a list takes commas
    revision: 0123456     "0123456"       a text keeps what was written
    create_bucket: no     False           a boolean takes words; a number takes none
    learner:              {}              a section with nothing under it means its defaults

Limits and the rest are pydantic's, on the whole, later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from grpod.config_keys import ROOT, Key, key_at, nearest, wanted
from grpod.config_keys import Path as KeyPath
from grpod.config_yaml import Given, Layer, dotted

_PATTERN = "vLLM drops it, and serves one rank and one alpha for all modules"
NOT_SERVED = {  # fields of PEFT, by name of the key that one would expect -> why there is none
    "lora.use_dora": "vLLM does not serve DoRA",
    "lora.modules_to_save": "vLLM does not serve whole modules beside the adapter",
    "lora.bias": "vLLM does not serve trained biases",
    "lora.lora_bias": "vLLM does not serve trained biases",
    "lora.alpha_pattern": _PATTERN,
    "lora.rank_pattern": _PATTERN,
    "lora.use_rslora": "the scale is lora.alpha / lora.rank; for the other multiply lora.alpha by the root of lora.rank",
    "lora.init_lora_weights": "B begins at zero; others (pissa, olora, …) change the base model, which replicas serve as it is",
    "lora.layers_to_transform": "an adapter is on every layer",
    "lora.r": "its name is lora.rank",
}
_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}


class Fitting:
    """One layer against the keys: unknown ones are faults, values are made to fit where what was meant is plain."""

    def __init__(self, layer: Layer, source: str) -> None:
        self.layer, self.source = layer, source

    def fault(self, path: KeyPath, text: str) -> None:
        given = self.layer.given.get(path)
        self.layer.faults.append(f"{given.source if given else self.source}: {text}")

    def section(self, key: Key, values: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
        fitted: dict[str, Any] = {}
        known = key.below()
        for name, value in values.items():
            at = (*path, name)
            if name not in known:
                self.fault(at, unknown(at, section=isinstance(value, dict)))
            elif known[name].section is None:
                fit = self.leaf(known[name], value, at)
                if fit is not None:
                    fitted[name] = fit[0]
            elif isinstance(value, dict):
                fitted[name] = self.section(known[name], value, at)
            elif value is not None:  # a section with nothing under it means its defaults
                self.layer.faults.append(misfit(at, known[name], self.layer.given.get(at)))
        return fitted

    def leaf(self, key: Key, value: Any, at: KeyPath) -> tuple[Any] | None:
        """None: leave the key out."""
        if value is not None or type(None) in key.kinds:
            return (self.fit(key, value, at),)
        if key.kinds == [str] and self.empty(at):
            return ("",)
        if len(key.kinds) == 1 and get_origin(key.kinds[0]) in (list, dict):
            return (get_origin(key.kinds[0])(),)
        self.fault(at, f"{dotted(at)} is empty; wanted: {wanted(key)}, or leave the key out")
        return None

    def empty(self, at: KeyPath) -> bool:
        given = self.layer.given.get(at)
        return given is not None and not given.written

    def fit(self, key: Key, value: Any, at: KeyPath) -> Any:
        kinds = key.kinds
        written = self.written(at, value)
        if bool in kinds and isinstance(value, str):
            return _WORDS.get(value.lower(), value)
        item = key.item()
        if item is not None:
            fixed = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
            if value in fixed:
                return value
            if isinstance(value, str | int | float):
                value = [part.strip() for part in (value if isinstance(value, str) else written).split(",") if part.strip()]
            if isinstance(value, list):
                return [self.fit_item(item, one, (*at, i)) for i, one in enumerate(value)]
        elif isinstance(value, int | float) and str in kinds and not {int, float, bool}.intersection(kinds):
            return written  # `revision: 0123456` is a text, and keeps its zero
        elif any(get_args(kind) == (str, str) for kind in kinds) and isinstance(value, dict):
            return {k: v if isinstance(v, str) else self.written((*at, k), v) for k, v in value.items()}
        return value

    def written(self, at: KeyPath, value: Any) -> str:
        return self.layer.given[at].written if at in self.layer.given else str(value)

    def fit_item(self, item: Key, value: Any, at: KeyPath) -> Any:
        if item.section is None:
            return self.fit(item, value, at)
        if isinstance(value, str):
            return {next(iter(item.below())): value}  # rewards: [math] is rewards: [{function: math}]
        return self.section(item, value, at) if isinstance(value, dict) else value


def unknown(path: KeyPath, *, section: bool = False) -> str:
    name = dotted(path)
    words = [part for part in path if isinstance(part, str)]
    if any(isinstance(part, int) for part in path):
        parent = key_at(path[:-1])
        return f"no key {name}; there are {', '.join(parent.below()) if parent else ''}"
    if why := NOT_SERVED.get(name):
        return f"no key {name}: {why}; in {words[0]} there are {', '.join(ROOT.below()[words[0]].below())}"
    near = nearest(words, section=section) or nearest(words, section=not section)
    if near is not None:
        return f"no key {name}; did you mean {near.name}?"
    parent = key_at(path[:-1]) or ROOT
    return f"no key {name}; {'in ' + parent.name if parent.path else 'at the top'} there are {', '.join(parent.below())}"


def misfit(path: KeyPath, key: Key, given: Given | None, right: str | None = None) -> str:
    source, written = (f"{given.source}: ", f"{given.written} ") if given else ("", "")
    words = wanted(key)
    return (
        f"{source}{dotted(path)}: {written}does not fit; wanted: {words if right is None else words.replace('a number', right)}"
    )
