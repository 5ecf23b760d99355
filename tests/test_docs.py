"""The README and what is shipped, held to the code.

    python -m tests.test_docs --write      makes the README's tables and its file tree anew from the code

What stands between `<!-- name -->` and `<!-- /name -->` is generated, name being a key of GENERATED.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from grpod import configure
from grpod.cli.app import COMMANDS, app
from grpod.telemetry.metrics import METRICS
from grpod.wire.reasons import REASONS

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
SECTIONS = (
    "What you see",
    "vLLM",
    "The three roles",
    "A run on Hugging Face Jobs",
    "Owned GPUs with systemd",
    "Configuration",
    "What lies in the bucket",
    "Metrics",
    "When things go wrong",
    "Files",
    "Development",
    "Changelog",
)


# ---- what is generated


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def config_table() -> str:
    rows = [(f"`{key}`", f"`{default}`" if default else "", mark, doc) for key, default, mark, doc in configure.table()]
    return table(("key", "default", "", "meaning"), rows)


def metrics_table() -> str:
    return table(("name", "unit", "kind", "meaning"), [(f"`{m.name}`", m.unit, m.kind, m.help) for m in METRICS])


def reasons_table() -> str:
    return table(("word", "of a", "said by", "what happened"), [(f"`{r.word}`", r.what, r.by, r.meaning) for r in REASONS])


def tree() -> str:
    """Every module of grpod with the first sentence of its docstring."""
    lines = ["```"]
    for folder in (ROOT / "grpod", *sorted(path for path in (ROOT / "grpod").rglob("*") if path.is_dir())):
        files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        if not files:
            continue
        depth = "  " * len(folder.relative_to(ROOT).parts)
        lines.append(f"{depth[2:]}{folder.name}/")
        lines += [f"{depth}{path.name:<20} {first_sentence(path)}" for path in files]
    return "\n".join([*lines, "```"])


def first_sentence(path: Path) -> str:
    paragraph = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.;?]) ", paragraph)[0].rstrip(".:;")
    return sentence if len(sentence) <= 110 else sentence[:108].rsplit(" ", 1)[0].rstrip(",:") + " …"


GENERATED: dict[str, Callable[[], str]] = {
    "config": config_table,
    "metrics": metrics_table,
    "reasons": reasons_table,
    "tree": tree,
}


def between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", GENERATED)
def test_what_is_generated_is_up_to_date(name: str) -> None:
    found = between(name).search(README.read_text())
    assert found, f"README.md has no <!-- {name} --> … <!-- /{name} -->"
    assert found[0] == GENERATED[name]() + "\n", "run: python -m tests.test_docs --write"


# ---- what the tables rest on: every word that the code says is in them


SAID_IN = {  # module of grpod -> what its words are said of
    "generator/kinds.py": "row",
    "generator/prompts.py": "row",
    "generator/reward.py": "group",
    "generator/reward_values.py": "group",
    "generator/reward_worker.py": "group",
    "generator/rollouts.py": "group",
    "generator/loop.py": "group",
    "grpo/admission.py": "group",
    "learner/feed.py": "group",
    "learner/session.py": "group",
    "run/tally.py": "group",
    "wire/rollout.py": "part",
    "wire/tables.py": "object",
    "wire/doc.py": "object",
    "replica/answers.py": "answer",
    "replica/adapters.py": "version",
    "learner/checkpoint.py": "checkpoint",
}


def test_every_reason_in_the_code_is_in_the_table_and_the_other_way_round() -> None:
    said = {(what, word) for path, what in SAID_IN.items() for word in words(ROOT / "grpod" / path)}
    listed = {(reason.what, reason.word) for reason in REASONS}
    assert sorted(said - listed) == []
    assert sorted(listed - said) == []


def words(path: Path) -> set[str]:
    """String literals where a reason stands: what certain calls take, certain functions return, and a `reason` is set to."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id="WireError" | "UnusableAnswer" | "Fault" | "RewardFailure"), args=[word, *_]):
                found.append(word)
            case ast.Call(func=ast.Attribute(attr="_drop" | "drop" | "_refuse"), args=[_, word, *_]):
                found.append(word)
            case ast.Call(func=ast.Name(id="Drop" | "Refusal"), keywords=keywords):
                found += [keyword.value for keyword in keywords if keyword.arg == "reason"]
            case ast.FunctionDef(name="verdict" | "trainable" | "_fault") | ast.AsyncFunctionDef(name="_ask"):
                found += [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return)]
            case ast.Assign(targets=[ast.Name(id="reason")], value=word):
                found.append(word)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):  # LOST, … = "lost", …
                found += [value for name, value in zip(names, values, strict=False) if getattr(name, "id", "").isupper()]
            case ast.Dict(keys=[ast.Constant(value="reason"), *_], values=[word, *_]):
                found.append(word)
    found += [word for either in found if isinstance(either, ast.IfExp) for word in (either.body, either.orelse)]
    texts = (word.value for word in found if isinstance(word, ast.Constant) and isinstance(word.value, str))
    return {text for text in texts if text}


# ---- what is shipped


def shipped(*patterns: str) -> list[Path]:
    skipped = {"build", "dist", "runs", "base"}
    return sorted(
        path
        for pattern in patterns
        for path in ROOT.rglob(pattern)
        if not any(part in skipped or part.startswith(".venv") for part in path.relative_to(ROOT).parts[:-1])
    )


@pytest.mark.parametrize("path", shipped("*.yaml", "*.yml"), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_yaml_is_a_config_that_starts_every_role(path: Path) -> None:
    loaded = configure.load(path, env={}, sets=())
    configure.check_roles(loaded.config, ("learner", "generator", "proxy"), path=path)
    data = loaded.config.data
    assert data is not None
    hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", data.source) and not Path(data.source).suffix
    assert hub_id or (path.parent / data.source).is_file(), "an example brings its prompts, or names them on the Hub"


def test_yaml_in_the_readme_is_config() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        configure.load(None, env={}, sets=(), base=yaml.safe_load(block))


def test_sections_stand_in_order_and_the_changelog_is_last() -> None:
    assert tuple(re.findall(r"^## (.+)$", README.read_text(), re.MULTILINE)) == SECTIONS


def test_what_the_readme_tells_to_run_exists() -> None:
    options = {option for parameter in app.params for option in parameter.opts}
    ours = [words for words in commands() if any(word.endswith("bin/grpod") for word in words) or words[0] == "grpod"]
    assert len(ours) >= 8
    for words in ours:
        at = next(i for i, word in enumerate(words) if Path(word).name == "grpod")
        assert words[at + 1] in COMMANDS or words[at + 1] in options, words
        if words[at + 1] in options:
            assert {word for word in words[at:] if word.startswith("--")} <= options, words
    for words in commands():
        for word in words:
            if word.startswith(("examples/", "systemd/", ".ci/")):
                assert (ROOT / word).exists(), words


def commands() -> Iterator[list[str]]:
    """Every command of the README's bash blocks, in words."""
    for block in re.findall(r"```bash\n(.*?)```", README.read_text(), re.DOTALL):
        for line in re.sub(r"&&\n", "\n", block.replace("\\\n", "")).splitlines():
            yield from (shlex.split(part, comments=True) for part in line.split("&&") if shlex.split(part, comments=True))


def test_links_of_the_readme_lead_somewhere() -> None:
    text = README.read_text()
    anchors = {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif "://" not in target:
            assert (ROOT / target).exists(), target


def test_the_unit_stays_down_on_a_bad_config_and_cannot_restart_for_ever() -> None:
    text = (ROOT / "systemd/grpod@.service").read_text()
    keys = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    assert {"2", "3"} <= set(keys["RestartPreventExitStatus"].split())
    assert int(keys["StartLimitBurst"]) * int(keys["RestartSec"]) < int(keys["StartLimitIntervalSec"])
    command = shlex.split(keys["ExecStart"])
    options = {option for parameter in app.params for option in parameter.opts}
    assert {word for word in command if word.startswith("--")} <= options


def write() -> None:
    text = README.read_text()
    for name, make in GENERATED.items():
        made = make() + "\n"
        text, count = between(name).subn(lambda _: made, text)  # noqa: B023 - called in this turn
        assert count == 1, name
    README.write_text(text)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
