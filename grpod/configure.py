"""From text to a `Config`, once and strictly; what comes after may trust it.

    run.json (joiners)  ->  YAML  ->  GRPOD_RUN, GRPOD_SECTION__KEY  ->  --set section.key=value     each overrides those before
          each layer: known keys? values made to fit their key's type        then one check of the whole

Every fault names the key in full, the value as it was written, where that stands, and what would be right; all of them come
in one `ConfigError`. A number is the same number whichever way it came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from grpod.config import Config
from grpod.config_engine import check_engine
from grpod.config_fit import NOT_SERVED, Fitting, misfit, unknown
from grpod.config_keys import ROOT, all_keys, key_at, leaves, nearest, schema, table
from grpod.config_keys import Path as KeyPath
from grpod.config_yaml import Given, Layer, dotted, read_file, read_value
from grpod.errors import ConfigError

__all__ = ["Loaded", "agreed_values", "check_roles", "differences", "load", "schema", "table"]

RUN_VARIABLE = "GRPOD_RUN"
NO_KEYS = frozenset({RUN_VARIABLE, "GRPOD_SPOT_NOTICE"})  # variables of ours that are not part of the config


@dataclass(frozen=True, kw_only=True)
class Loaded:
    config: Config
    folder: Path  # relative paths of the config are relative to it
    path: Path | None  # of the config file


def load(
    path: Path | None, *, env: Mapping[str, str], sets: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> Loaded:
    """`base`: the agreed config of the run that is joined. Raises `ConfigError` with every fault; writes nothing."""
    whole = _Whole()
    if base is not None:
        whole.take(Layer(value=dict(base)), "run.json")
    if path is not None:
        whole.take(read_file(path), str(path))
    for name in sorted(env):  # GRPOD_RUN comes before GRPOD_RUN__BUCKET, so that the longer name wins
        if name == RUN_VARIABLE:
            if env[name]:
                whole.one(("run", "bucket"), env[name], name)
        elif name.startswith("GRPOD_") and name not in NO_KEYS:
            whole.variable(name, env[name])
    for text in sets:
        whole.set(text)
    config = whole.config()
    return Loaded(config=config, folder=(path.parent if path else Path()).resolve(), path=path)


@dataclass(kw_only=True)
class _Whole:
    """The layers so far, one over the other. Lives for the length of `load`."""

    values: dict[str, Any] = field(default_factory=dict)
    given: dict[KeyPath, Given] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def take(self, layer: Layer, source: str) -> None:
        fitted = Fitting(layer, source).section(ROOT, layer.value, ())
        self.faults += layer.faults
        _merge(self.values, fitted)
        self.given.update(layer.given)

    def one(self, path: tuple[str, ...], text: str, source: str) -> None:
        key = key_at(path)
        if key is not None and key.kinds == [str] and text.strip()[:1] in ("[", "{", "-"):
            layer = Layer(
                value=text, given={path: Given(source=source, written=text)}
            )  # a text, whatever YAML would make of it
        else:
            layer = read_value(text, source, path)
        if layer.faults:
            self.faults += layer.faults
            return
        for part in reversed(path):
            layer.value = {part: layer.value}
        self.take(layer, source)

    def variable(self, name: str, text: str) -> None:
        path = _split(name.removeprefix("GRPOD_"), "__")
        if path is not None:
            self.one(path, text, name)
            return
        asked = [part.lower() for part in name.removeprefix("GRPOD_").split("__")]
        if len(asked) == 1 and any(asked[0].startswith(f"{section}_") for section in ROOT.below()):
            asked = asked[0].split("_", 1)  # one underscore between section and key
        near = nearest(asked) or nearest(asked, section=True)
        hint = f"; did you mean GRPOD_{'__'.join(near.path).upper()}?" if near else "; variables are named GRPOD_SECTION__KEY"
        hint = f": {why}" if (why := NOT_SERVED.get(".".join(asked))) else hint
        self.faults.append(f"{name}: no such key{hint}")

    def set(self, text: str) -> None:
        name, equals, value = text.partition("=")
        if not equals:
            self.faults.append(f"--set {text}: wanted section.key=value")
            return
        path = _split(name.strip(), ".")
        if path is not None:
            self.one(path, value, f"--set {name.strip()}")
        else:
            self.faults.append(f"--set {text}: {unknown(tuple(name.strip().split('.')))}")

    def config(self) -> Config:
        config = None
        try:
            config = Config.model_validate(self.values)
        except ValidationError as error:
            self.faults += dict.fromkeys(self.explain(one["loc"], one["type"], one["msg"]) for one in error.errors())
        if self.faults or config is None:
            raise ConfigError("\n".join(dict.fromkeys(self.faults)))
        return config

    def explain(self, loc: tuple[str | int, ...], kind: str, message: str) -> str:
        while loc and key_at(loc) is None:
            loc = loc[:-1]  # pydantic appends the alternative of a union that it tried
        key = key_at(loc)
        if key is None or not loc:
            return message.removeprefix("Value error, ")
        if kind == "missing":
            given = self.given.get(loc[:-1])
            return (
                f"{given.source + ': ' if given else ''}{dotted(loc)} is missing: {key.field.description if key.field else ''}"
            )
        return misfit(loc, key, self.given.get(loc), "a finite number" if kind == "finite_number" else None)


def _split(name: str, separator: str) -> tuple[str, ...] | None:
    """The key's path, None if there is none. Below a mapping (`generator.vllm.env`) the rest is one name, as written."""
    key, parts = ROOT, name.split(separator)
    for i, part in enumerate(parts):
        if key.field is not None and any(get_origin(kind) is dict for kind in key.kinds):
            return (*key.path, separator.join(parts[i:]))
        below = key.below().get(part.lower() if separator == "__" else part)
        if below is None:
            return None
        key = below
    return key.path


def _merge(into: dict[str, Any], over: Mapping[str, Any]) -> None:
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def check_roles(config: Config, roles: Sequence[str], *, path: Path | None = None) -> None:
    """Each role asks only for what it needs; `roles` are names, with or without an index. Raises `ConfigError`."""
    kinds = {role.partition("-")[0] for role in roles}
    missing: dict[str, str] = {}
    if kinds & {"learner", "generator"}:
        missing |= {"model.base": "the base model"} if not config.model.base else {}
    if "generator" in kinds:
        missing |= {"data.source": "the prompts"} if config.data is None or not config.data.source else {}
        missing |= {"rewards": "the reward functions"} if not config.rewards else {}
        if config.generator.engine == "remote" and not config.generator.remote.url:
            missing["generator.remote.url"] = "of the replica, as generator.engine is remote"
    if kinds & {"learner", "generator"} and not config.run.bucket:
        missing["run.bucket"] = f"the run's URL; {RUN_VARIABLE} says it too"
    if kinds == {"proxy"} and not config.run.bucket and not config.proxy.replicas:
        missing["proxy.replicas"] = "their URLs; or run.bucket, where they are found"
    if missing:
        words = ", ".join(f"{key} ({why})" for key, why in missing.items())
        raise ConfigError(f"{f'{path}: ' if path else ''}missing for {' and '.join(sorted(kinds))}: {words}")
    not_yet = {
        "run.from": bool(config.run.from_) and "learner" in kinds,
        "telemetry.sinks": bool(config.telemetry.sinks),
        "telemetry.price_per_hour": config.telemetry.price_per_hour is not None,
    }
    if any(not_yet.values()):
        words = ", ".join(key for key, asked in not_yet.items() if asked)
        raise ConfigError(f"{f'{path}: ' if path else ''}not in this build yet: {words}; leave it out")
    if "generator" in kinds:
        check_engine(config)
    devices = config.generator.devices
    for role in roles:
        kind, _, index = role.partition("-")
        if kind == "generator" and index and int(index) >= len(devices):
            named = f"names {len(devices)} ({', '.join(devices)}), counted from 0" if devices else "is empty: name one for each"
            raise ConfigError(f"{role}: generator.devices {named}")


def agreed_values(config: Config) -> dict[str, Any]:
    """The `config` of run.json, nested as in the YAML: agreed keys, and the offered ones that are set.

    Sections that are not there (`data` of a learner's config) and an empty `rewards` are left out: nothing is agreed on them.
    """
    dump = config.model_dump(mode="json", by_alias=True)
    agreed: dict[str, Any] = {}
    for key in leaves():
        value = _at(dump, key.path)
        if value is _ABSENT or not (key.marked("agreed") or (key.marked("offered") and value)):
            continue
        if key.name == "rewards" and not value:
            continue
        inner = agreed
        for part in key.path[:-1]:
            inner = inner.setdefault(part, {})
        inner[key.path[-1]] = value
    return agreed


def differences(
    theirs: Mapping[str, Any], config: Config, *, ignore: Sequence[str] = ("learner",), but: Sequence[str] = ()
) -> list[str]:
    """One message for each agreed key that both sides have and that differs; `ignore` names keys or whole sections, `but`
    keys in them that are compared all the same."""
    ours = agreed_values(config)
    messages: list[str] = []
    for key in all_keys():
        if key.section is not None or not key.marked("agreed"):
            continue
        if key.name not in but and any(key.name == name or key.name.startswith(f"{name}.") for name in ignore):
            continue
        there, here = _at(theirs, key.path), _at(ours, key.path)
        if there is not _ABSENT and here is not _ABSENT and there != here:
            messages.append(f"{key.name} is {there} in the run and {here} here")
    return messages


_ABSENT: Any = object()


def _at(values: Any, path: Sequence[str]) -> Any:
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return _ABSENT
        values = values[part]
    return values
