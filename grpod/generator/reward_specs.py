"""`rewards` of the config, resolved as far as it goes without running user code: built-ins, files, distinct names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from grpod.config import RewardSection, resolve
from grpod.errors import ConfigError
from grpod.generator.builtin_rewards import BUILT_IN
from grpod.generator.reward_functions import RewardSpec


def reward_specs(rewards: Sequence[RewardSection], folder: Path) -> tuple[RewardSpec, ...]:
    """`folder`: of the config file. Each spec has a name of its own: of two functions `reward`, the second is `reward_2`."""
    if not rewards:
        raise ConfigError(f"rewards is empty: a generator needs one at least; built in are {', '.join(BUILT_IN)}")
    if all(section.weight == 0 for section in rewards):
        raise ConfigError("rewards: every weight is 0, so that no completion could be told from another")
    specs: list[RewardSpec] = []
    for section in rewards:
        where, attribute, source = _locate(section.function, folder)
        name = _unused(attribute.rpartition(".")[2], {spec.name for spec in specs})
        specs.append(
            RewardSpec(
                name=name,
                function=section.function,
                where=where,
                attribute=attribute,
                source=source,
                options=section.options,
            )
        )
    return tuple(specs)


def _locate(function: str, folder: Path) -> tuple[str, str, str | None]:
    """(module or file, attribute, the file's text); a built-in has no module."""
    where, colon, attribute = function.rpartition(":")
    if not colon:
        if function in BUILT_IN:
            return "", function, None
        near = difflib.get_close_matches(function, BUILT_IN, n=1)
        raise ConfigError(
            f'rewards.function {function!r} is not built in ({", ".join(BUILT_IN)}) and names no "file.py:function" '
            f'or "package.module:function"{f"; did you mean {near[0]!r}?" if near else ""}'
        )
    if not where or not all(part.isidentifier() for part in attribute.split(".")):
        raise ConfigError(f'rewards.function {function!r}: "file.py:function" or "package.module:function" was expected')
    if not where.endswith(".py"):
        return where, attribute, None
    path = resolve(where, folder)
    try:
        return str(path), attribute, path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"rewards.function {function!r}: {path} cannot be read: {error}") from error


def _unused(name: str, used: set[str]) -> str:
    if name not in used:
        return name
    number = 2
    while f"{name}_{number}" in used:
        number += 1
    return f"{name}_{number}"
