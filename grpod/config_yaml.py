"""YAML as people write it. Values are plain Python; beside each stands what was written, and where.

    1e-5, 3E-4, .inf     numbers (YAML 1.1, and so PyYAML, reads the first two as text)
    true, false, null    as in YAML 1.2;  yes, no, on, off  stay text: what wants a boolean takes them, a number never does
    a key given twice    a fault that names it in full; the last would win in silence otherwise

Faults are collected, not raised: one run of `grpod config --check` shows them all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml

from grpod.config_keys import Path

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INF = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_WORDS = {"": None, "~": None} | {form: value for word, value in (("null", None), ("true", True), ("false", False))
                                  for form in (word, word.capitalize(), word.upper())}  # fmt: skip
_SCALAR_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null")}


@dataclass(frozen=True, kw_only=True)
class Given:
    source: str  # "grpod.yaml:3", "GRPOD_LEARNER__STEPS", "--set learner.steps"
    written: str


@dataclass(kw_only=True)
class Layer:
    """What one source says. Owned by whoever reads it; complete once it is returned."""

    value: Any = None
    given: dict[Path, Given] = field(default_factory=dict)  # for every place in `value`
    faults: list[str] = field(default_factory=list)


def scalar(text: str) -> Any:
    """A plain (unquoted) scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if match := _INF.fullmatch(text):
        return float(f"{match[1]}inf")
    return float("nan") if text in (".nan", ".NaN", ".NAN") else text


def read_file(path: FilePath) -> Layer:
    layer = Layer(value={})
    try:
        data = path.read_bytes()
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except OSError as error:
        layer.faults.append(f"{path}: cannot be read: {error.strerror or error}")
        return layer
    except UnicodeDecodeError as error:
        layer.faults.append(f"{path}: byte {error.start} is not UTF-8 text")
        return layer
    _read(text, str(path), (), layer, numbered=True)
    if layer.value is None:
        layer.value = {}
    elif not isinstance(layer.value, dict):
        kind = "a list" if isinstance(layer.value, list) else "a single value"
        layer.faults.append(f"{path}: holds {kind}; sections were wanted at the top, as in `model:` and, below it, `  base: …`")
        layer.value = {}
    return layer


def read_value(text: str, source: str, path: Path) -> Layer:
    """The value of a variable or a --set: a plain scalar whole (`#` and `: ` mean nothing in it), or else YAML."""
    layer = Layer()
    text = text.strip()
    if text[:1] in ("[", "{", '"', "'") or text.startswith("- ") or "\n" in text:
        _read(text, source, path, layer, numbered=False)
    else:
        layer.value = scalar(text)
        layer.given[path] = Given(source=source, written=text)
    return layer


class _Loader(yaml.SafeLoader):
    """Composes only: which plain scalar is what, `scalar` decides."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  declared as an instance variable by PyYAML's stubs


def _read(text: str, source: str, path: Path, layer: Layer, *, numbered: bool) -> None:
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark and numbered else source
        hint = "; indent with blanks, not with tabs" if "'\\t'" in str(error.problem) else ""
        layer.faults.append(f"{where}: not YAML: {error.problem or error.context}{hint}")
        return
    except yaml.YAMLError as error:
        layer.faults.append(f"{source}: not YAML: {str(error).splitlines()[0]}")
        return
    if node is not None:
        layer.value = _Reader(text, source, layer, numbered=numbered).value(node, path, ())


class _Reader:
    def __init__(self, text: str, source: str, layer: Layer, *, numbered: bool) -> None:
        self.text, self.source, self.layer, self.numbered = text, source, layer, numbered

    def value(self, node: yaml.Node, path: Path, above: tuple[int, ...]) -> Any:
        written = " ".join(self.text[node.start_mark.index : node.end_mark.index].split())
        self.layer.given[path] = Given(source=self.where(node), written=written if len(written) <= 80 else written[:77] + "…")
        if id(node) in above:
            self.layer.faults.append(f"{self.where(node)}: an alias that holds itself")
        elif isinstance(node, yaml.MappingNode):
            return self.mapping(node, path, (*above, id(node)))
        elif isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, i), (*above, id(node))) for i, item in enumerate(node.value)]
        elif isinstance(node, yaml.ScalarNode) and node.tag in _SCALAR_TAGS:
            return scalar(node.value) if node.style is None else node.value
        else:
            self.layer.faults.append(f"{self.where(node)}: tag {node.tag} means nothing here")
        return None

    def mapping(self, node: yaml.MappingNode, path: Path, above: tuple[int, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.layer.faults.append(f"{self.where(key)}: a key must be a word")
            elif key.value in values:
                name = dotted((*path, key.value))
                self.layer.faults.append(f"{self.where(key)}: {name} is given twice, the first time in line {first[key.value]}")
            else:
                first[key.value] = key.start_mark.line + 1
                values[key.value] = self.value(value, (*path, key.value), above)
                inner = self.layer.given[(*path, key.value)]
                # the key's line, not that of the value: a section's value begins a line later
                self.layer.given[(*path, key.value)] = Given(source=self.where(key), written=inner.written)
        return values

    def where(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}" if self.numbered else self.source


def dotted(path: Path) -> str:
    """rewards[0].weight"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
