"""Every key of the config as a list: found by name, shown as a table, as a JSON Schema, and as "did you mean".

    key_at(("learner", "lr"))       None, and  nearest(("learner", "lr"))  is  learner.learning_rate
    wanted(<learning_rate>)         "a number above 0"
    table()                         one row a key: the README's table is checked against it

Pure, and made from `config.py` alone: there is no second list to keep in step.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grpod.config import Config

Path = tuple[str | int, ...]  # an int is a place in a list
_LIKELY = 0.65  # below this likeness a suggestion would be a guess


@dataclass(frozen=True, kw_only=True)
class Key:
    path: tuple[str, ...]  # as it is written, so with aliases; () is the whole config
    annotation: Any
    field: FieldInfo | None  # None: the whole config, or an item of a list

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def section(self) -> type[BaseModel] | None:
        """The model of the keys below; None: this is a leaf."""
        return next((k for k in self.kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)

    @property
    def kinds(self) -> list[Any]:
        return kinds(self.annotation)

    def marked(self, mark: Literal["agreed", "offered"]) -> bool:
        extra = self.field.json_schema_extra if self.field else None
        return isinstance(extra, dict) and bool(extra.get(mark))

    def below(self) -> dict[str, Key]:
        if self.section is None:
            return {}
        fields = {field.alias or name: field for name, field in self.section.model_fields.items()}
        return {name: Key(path=(*self.path, name), annotation=f.annotation, field=f) for name, f in fields.items()}

    def item(self) -> Key | None:
        """What stands in the list, if it is one."""
        inner = next((get_args(kind)[0] for kind in self.kinds if get_origin(kind) is list), None)
        return None if inner is None else Key(path=(*self.path[:-1], self.path[-1] + "[]"), annotation=inner, field=None)


ROOT = Key(path=(), annotation=Config, field=None)


def kinds(annotation: Any) -> list[Any]:
    """The alternatives of a type: `Int | Literal["auto"] | None` gives int, the Literal, NoneType."""
    if get_origin(annotation) is Annotated:
        return kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in kinds(part)]
    return [annotation]


def key_at(path: Path) -> Key | None:
    key: Key | None = ROOT
    for part in path:
        if key is None:
            return None
        key = key.item() if isinstance(part, int) else key.below().get(part)
    return key


@cache
def all_keys() -> tuple[Key, ...]:
    """Sections and leaves, in the order of config.py."""
    return tuple(_walk(ROOT))


def _walk(key: Key) -> Iterator[Key]:
    for child in key.below().values():
        yield child
        yield from _walk(child)


def leaves() -> tuple[Key, ...]:
    return tuple(key for key in all_keys() if key.section is None)


def nearest(path: Sequence[str], *, section: bool = False) -> Key | None:
    """The key that was probably meant: a hyphen for an underscore, a slip, the wrong level, initials (`lr`)."""
    asked = [part.lower().replace("-", "_") for part in path]
    rated = [(_likeness(asked, key), key) for key in all_keys() if (key.section is not None) == section]
    best = max(rated, key=lambda pair: pair[0], default=None)
    return best[1] if best and best[0] >= _LIKELY else None


def _likeness(asked: Sequence[str], key: Key) -> float:
    name, parents, asked_parents = key.path[-1], ".".join(key.path[:-1]), ".".join(asked[:-1])
    last = asked[-1]
    initials = "".join(word[0] for word in name.split("_") if word) if "_" in name else name
    if last == name:
        leaf = 1.0
    elif last == initials or (len(last) >= 4 and name.startswith(last.rstrip("s"))):
        leaf = 0.9
    else:
        leaf = SequenceMatcher(None, last, name).ratio()
    # a right name on the wrong level is likelier than a wrong name on the right one
    level = 1.0 if parents == asked_parents else 0.8 * SequenceMatcher(None, asked_parents, parents).ratio()
    return 0.8 * leaf + 0.2 * level


def wanted(key: Key) -> str:
    """In words, with its limits: what fits here."""
    if key.section is not None:
        return f"a section with keys {', '.join(key.below())}"
    return _in_words(key.annotation, list(key.field.metadata) if key.field else [])


def _in_words(annotation: Any, metadata: list[Any]) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [m for part in args[1:] for m in (part.metadata if isinstance(part, FieldInfo) else [part])]
        return _in_words(args[0], [*inner, *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(part, metadata) for part in args)
    if origin is Literal:
        return " or ".join(str(value) for value in args)
    if origin is list:
        item = Key(path=("",), annotation=args[0], field=None)
        return "a list of {" + ", ".join(item.below()) + "}" if item.section else f"a list, each {_in_words(args[0], [])}"
    if origin is dict:
        return "a mapping"
    words = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "nothing (null)"}
    limits = _limits(metadata) if annotation in (int, float) else []
    article = "" if annotation in (bool, type(None)) else "a "
    return article + " ".join([words.get(annotation, str(annotation)), *limits])


def _limits(metadata: list[Any]) -> list[str]:
    signs = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
    found = [f"{word} {getattr(m, sign)}" for m in metadata for sign, word in signs.items() if hasattr(m, sign)]
    return [" and ".join(found)] if found else []


def table() -> list[tuple[str, str, str, str]]:
    """(key, default, "agreed" | "local", meaning), one row a leaf; what a list holds follows as `rewards[].weight`."""
    rows: list[tuple[str, str, str, str]] = []
    for key in leaves():
        rows.append(_row(key, key.marked("agreed")))
        item = key.item()
        if item is not None:
            rows += [_row(inner, key.marked("agreed")) for inner in item.below().values()]
    return rows


def _row(key: Key, agreed: bool) -> tuple[str, str, str, str]:
    assert key.field is not None
    default = key.field.get_default(call_default_factory=True)
    if default is None or key.field.is_required():
        shown = ""
    else:
        shown = str(default).lower() if isinstance(default, bool) else str(default)
    return key.name, shown, "agreed" if agreed else "local", key.field.description or ""


def schema() -> dict[str, Any]:
    """JSON Schema of the config file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema(by_alias=True)}
