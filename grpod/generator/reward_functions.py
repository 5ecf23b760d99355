"""Reward functions by name, and what each is called with. Runs in the reward worker: imports the standard library only.

A function is called by keyword, with what its signature takes and no more: prompts, completions, completion_ids, the row's
columns (each value once a completion), its options, and TRL's trainer_state (None), log_extra and log_metric (which do
nothing). A function with **kwargs gets all of them. A parameter that nothing can fill is a fault at start.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


def _ignore(*_: Any, **__: Any) -> None:
    pass


STANDARD = ("prompts", "completions", "completion_ids")
TRAINER: Mapping[str, Any] = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
_ATOMS = (str, bytes, int, float, bool, type(None))


class Unusable(Exception):
    """The config's fault: the message names the function and what would be right."""


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """One entry of `rewards`, resolved by the parent as far as it goes without running user code. Crosses the pipe."""

    name: str  # key of its values in a rollout
    function: str  # as the config names it
    where: str  # "" built in; a module; a file's path
    attribute: str
    source: str | None = None  # of a file: read once, so that a worker that comes back later runs the same text
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reward:
    spec: RewardSpec
    function: Callable[..., Any]
    takes: frozenset[str] | None  # parameters; None: anything (**kwargs)
    needs: frozenset[str]  # those without a default
    options: Mapping[str, Any]

    def arguments(
        self, prompt: Any, completions: Sequence[Any], completion_ids: Sequence[Any], columns: Mapping[str, Any]
    ) -> dict[str, Any]:
        n = len(completions)
        given = {name: _repeat(value, n) for name, value in columns.items()}
        # a row may lack a key that others have: what has no default is then given None, as a table would
        given.update({name: [None] * n for name in self.needs - given.keys()})
        given.update(TRAINER)
        given.update(prompts=_repeat(prompt, n), completions=list(completions), completion_ids=list(completion_ids))
        given.update(self.options)
        return given if self.takes is None else {name: value for name, value in given.items() if name in self.takes}


def _repeat(value: Any, n: int) -> list[Any]:
    """One copy for each completion: a function may change what it is given."""
    return [value] * n if isinstance(value, _ATOMS) else [copy.deepcopy(value) for _ in range(n)]


def load(specs: Sequence[RewardSpec], columns: Sequence[str]) -> list[Reward]:
    """Imports user code. Raises Unusable."""
    modules: dict[str, types.ModuleType] = {}
    return [_load(spec, columns, modules) for spec in specs]


def _load(spec: RewardSpec, columns: Sequence[str], modules: dict[str, types.ModuleType]) -> Reward:
    if not spec.where:
        return _built_in(spec, columns)
    module = modules.get(spec.where) or _import(spec)
    modules[spec.where] = module
    found: Any = module
    for part in spec.attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if inspect.isroutine(value) and not name.startswith("_")]
        raise Unusable(f"rewards.function {spec.function!r}: {spec.where} has no function {spec.attribute!r}; it has {names}")
    return _checked(spec, found, columns)


def _import(spec: RewardSpec) -> types.ModuleType:
    try:
        if spec.source is None:
            return importlib.import_module(spec.where)
        module = types.ModuleType(f"grpod_reward_{spec.where}")
        module.__file__ = spec.where
        sys.modules[module.__name__] = module  # dataclasses and pickle look there
        linecache.cache[spec.where] = (len(spec.source), None, spec.source.splitlines(True), spec.where)
        exec(compile(spec.source, spec.where, "exec", dont_inherit=True), vars(module))
        return module
    except BaseException as error:  # user code: SystemExit too is no reason for the worker to be gone without a word
        raise Unusable(
            f"rewards.function {spec.function!r}: {spec.where} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _built_in(spec: RewardSpec, columns: Sequence[str]) -> Reward:
    from grpod.generator.builtin_rewards import BUILT_IN

    make = BUILT_IN[spec.attribute]
    known = [name for name in inspect.signature(make).parameters if name != "columns"]
    for option in spec.options:
        if option not in known:
            raise Unusable(f"rewards.options of {spec.function!r}: no option {option!r}; it has {', '.join(known)}")
    try:
        function = make(columns, **spec.options)
    except (ValueError, TypeError) as error:
        raise Unusable(f"rewards.options of {spec.function!r}: {error}") from error
    return Reward(spec=spec, function=function, takes=None, needs=frozenset(), options={})


def _checked(spec: RewardSpec, function: Callable[..., Any], columns: Sequence[str]) -> Reward:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # written in C, says nothing about itself
        return Reward(spec=spec, function=function, takes=frozenset(STANDARD[:2]), needs=frozenset(), options={})
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    takes = frozenset(p.name for p in named)
    for option in spec.options:
        if option in STANDARD:
            raise Unusable(f"rewards.options of {spec.function!r}: {option!r} is what every function is given")
        if option not in takes and not anything:
            raise Unusable(f"rewards.options of {spec.function!r}: the function takes no parameter {option!r}")
    needs = [p.name for p in parameters if p.default is p.empty and (p in named or p.kind is p.POSITIONAL_ONLY)]
    fillable = {*STANDARD, *TRAINER, *columns, *spec.options}
    for name in needs:
        if name not in fillable or name not in takes:
            raise Unusable(
                f"rewards.function {spec.function!r} takes a parameter {name!r}, which is no column of the data "
                f"and no option; columns: {', '.join(columns) or 'none'}"
            )
    return Reward(
        spec=spec,
        function=function,
        takes=None if anything else takes,
        needs=frozenset(needs) & frozenset(columns),
        options=dict(spec.options),
    )
