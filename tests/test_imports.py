"""The house's rule, checked on every import statement: arrows point down, roles never meet, torch stays in its rooms.

cli -> daemon -> {generator, learner, proxy} -> {replica, run, grpo, jobs} -> {bucket, wire, config} -> {telemetry, errors}
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "grpod"
FLOORS = {  # of a package, or of a module at the top
    "__main__": 6,
    "cli": 5,
    "daemon": 4, "ending": 4,
    "generator": 3, "learner": 3, "proxy": 3,
    "replica": 2, "run": 2, "grpo": 2, "jobs": 2,
    "bucket": 1, "wire": 1, "context": 1, "config": 1, "configure": 1,
    "config_engine": 1, "config_fit": 1, "config_keys": 1, "config_yaml": 1,
    "telemetry": 0, "errors": 0, "imports": 0,
}  # fmt: skip
ROLES = {"generator", "learner", "proxy"}
TORCH_ROOMS = ("learner/*.py", "grpo/loss.py", "grpo/correction.py", "replica/embedded*.py")
TORCH = {"torch", "peft"}
TORCH_INSIDE = {"safetensors.torch"}


def files() -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, module, name): every import statement, wherever in the file; `name` is '' for `import module`."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            for alias in node.names:
                yield node.lineno, node.module or "", alias.name


def room(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


def inner_imports() -> Iterator[tuple[str, str, str]]:
    """(where, room of the importer, room of the imported)"""
    for path in files():
        for line, module, name in imports(path):
            parts = (*module.split("."), name) if name else tuple(module.split("."))
            if parts[0] == "grpod" and len(parts) > 1:
                yield f"grpod/{path}:{line}", room(path.parts), parts[1]


def test_every_room_of_the_house_has_a_floor() -> None:
    assert {room(path.parts) for path in files()} - FLOORS.keys() - {"__init__"} == set()


def test_arrows_point_down() -> None:
    assert [where for where, a, b in inner_imports() if FLOORS[b] > FLOORS[a]] == []


def test_roles_never_import_each_other() -> None:
    assert [where for where, a, b in inner_imports() if a in ROLES and b in ROLES and a != b] == []


def test_rooms_on_one_floor_do_not_import_in_a_circle() -> None:
    below: dict[str, set[str]] = {}
    for _, a, b in inner_imports():
        if a != b:
            below.setdefault(a, set()).add(b)

    def circle(at: str, way: tuple[str, ...]) -> tuple[str, ...] | None:
        if at in way:
            return (*way, at)
        return next((found for b in sorted(below.get(at, ())) if (found := circle(b, (*way, at)))), None)

    assert [found for start in below if (found := circle(start, ()))] == []


def test_torch_stays_in_its_rooms() -> None:
    outside = [path for path in files() if not any(fnmatch(path.as_posix(), pattern) for pattern in TORCH_ROOMS)]
    found = []
    for path in outside:
        for line, module, name in imports(path):
            model_code = module.partition(".")[0] == "transformers" and ("Model" in name or "models" in module.split("."))
            if module.partition(".")[0] in TORCH or module in TORCH_INSIDE or model_code:
                found.append(f"grpod/{path}:{line}: {module} {name}")
    assert found == []


def test_nothing_uses_asyncio_where_anyio_would_do() -> None:
    alone = {"generator/reward_worker.py"}  # a process of its own, without anyio's import: it runs a coroutine reward
    using = {path.as_posix() for path in files() for _, module, _ in imports(path) if module.partition(".")[0] == "asyncio"}
    assert using - alone == set()


def _loaded(code: str) -> set[str]:
    code += "\nimport sys; print(*sorted(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("parts", [("cli",), ("bucket", "wire", "telemetry"), ("run",), ("proxy",), ("daemon", "configure")])
def test_commands_proxy_and_what_they_use_start_without_torch(parts: tuple[str, ...]) -> None:
    wanted = [path for path in files() if room(path.parts) in parts]
    assert wanted
    modules = [".".join(("grpod", *path.with_suffix("").parts)).removesuffix(".__init__") for path in wanted]
    loaded = _loaded("\n".join(f"import {module}" for module in modules))
    assert not loaded & {"torch", "peft", "vllm", "datasets"}


def test_help_imports_nothing_heavy() -> None:
    quietly = "with contextlib.redirect_stdout(io.StringIO()): run(['--help'])"
    loaded = _loaded(f"from grpod.__main__ import run\nimport contextlib, io\n{quietly}")
    assert not loaded & {"torch", "transformers", "pydantic", "pyarrow", "aiohttp", "anyio", "structlog", "huggingface_hub"}
