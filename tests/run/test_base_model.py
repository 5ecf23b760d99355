from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest
from huggingface_hub import constants

from grpod.config import Config
from grpod.errors import ConfigError, NotReady
from grpod.run import base_model
from grpod.run.base_model import eos_ids, fingerprint, resolve_base, weights_dtype


def config(base: Any, **model: Any) -> Config:
    return Config.model_validate({"model": {"base": str(base), **model}})


def safetensors(values: bytes, **metadata: str) -> bytes:
    tensor = {"dtype": "U8", "shape": [len(values)], "data_offsets": [0, len(values)]}
    header = json.dumps({"__metadata__": metadata, "weight": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + values


def make_base(folder: Path, *, weights: bytes = b"abcd", **files: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4, "transformers_version": "5.0"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors(weights))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_a_path_is_relative_to_the_config_file(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    for name in ("base", "./base", str(base)):
        assert resolve_base(config(name), tmp_path) == base


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/no-such-model", "a/b/c"])
def test_what_looks_like_a_path_never_asks_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "_download", lambda *a: pytest.fail("asked the Hub"))
    with pytest.raises(ConfigError, match=r"no folder /.*config\.json") as caught:
        resolve_base(config(name), tmp_path)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("lost", "named"), [("config.json", "config.json"), ("model.safetensors", "safetensors"), ("tokenizer.json", "tokenizer")]
)
def test_a_folder_that_lacks_something_is_named_with_it(lost: str, named: str, tmp_path: Path) -> None:
    (make_base(tmp_path / "base") / lost).unlink()
    with pytest.raises(ConfigError, match=named):
        resolve_base(config("base"), tmp_path)


def test_weights_that_would_have_to_be_unpickled_are_not_read(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", **{"pytorch_model.bin": b"x"})
    (base / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="other formats"):
        resolve_base(config("base"), tmp_path)


def test_one_file_of_the_index_is_missing(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    base = make_base(tmp_path / "base", **{"model.safetensors.index.json": index, "model-1.safetensors": safetensors(b"a")})
    with pytest.raises(ConfigError, match="safetensors"):
        resolve_base(config("base"), tmp_path)
    (base / "model-2.safetensors").write_bytes(safetensors(b"b"))
    assert resolve_base(config("base"), tmp_path) == base


# ── fingerprint


def test_the_fingerprint_is_of_what_it_is_not_of_where_it_lies(tmp_path: Path) -> None:
    one, other = make_base(tmp_path / "one"), make_base(tmp_path / "elsewhere" / "other")
    (other / "config.json").write_text(json.dumps({"_name_or_path": "/tmp/x", "transformers_version": "6", "hidden_size": 4}))
    (other / "model.safetensors").write_bytes(safetensors(b"abcd"))
    (other / "README.md").write_text("hello")
    (other / "consolidated.safetensors").write_bytes(safetensors(b"not loaded by anybody"))
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(
    "change",
    [
        {"config.json": b'{"hidden_size": 5}'},
        {"tokenizer.json": b'{"a": 1}'},
        {"merges.txt": b"a b"},
        {"model.safetensors": safetensors(b"abcde")},
        {"model.safetensors": safetensors(b"abce")},  # fine-tuned: same shapes, other weights
    ],
)
def test_another_model_has_another_fingerprint(change: dict[str, bytes], tmp_path: Path) -> None:
    assert fingerprint(make_base(tmp_path / "one")) != fingerprint(make_base(tmp_path / "other", **change))


def test_large_weights_are_sampled_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "_WHOLE_FILE", 1000)
    monkeypatch.setattr(base_model, "_SAMPLE", 10)
    base = make_base(tmp_path / "base", weights=bytes(100_000))
    samples = list(base_model._content(base / "model.safetensors"))
    assert [len(sample) for sample in samples] == [10] * 16
    before = fingerprint(base)
    (base / "model.safetensors").write_bytes(safetensors(bytes(99_999) + b"\1"))
    assert fingerprint(base) != before


def test_a_cut_file_of_weights_is_named(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", **{"model.safetensors": b"\xff\0\0\0\0\0\0\0{"})
    with pytest.raises(ConfigError, match=r"model\.safetensors .*cut"):
        fingerprint(base)


# ── end tokens


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config.json": b'{"eos_token_id": [2, 0]}', "config.json": b'{"eos_token_id": 7}'}, (2, 0)),
        ({"generation_config.json": b'{"eos_token_id": 2}'}, (2,)),
        ({"generation_config.json": b"{}", "config.json": b'{"eos_token_id": 7}'}, (7,)),
        ({"config.json": b'{"text_config": {"eos_token_id": [7, 8]}}'}, (7, 8)),
        ({}, ()),
    ],
)
def test_every_token_that_ends_a_completion(files: dict[str, bytes], ids: tuple[int, ...], tmp_path: Path) -> None:
    assert eos_ids(make_base(tmp_path / "base", **files)) == ids


@pytest.mark.parametrize("token", ['"<end>"', '{"content": "<end>", "lstrip": false}'])
def test_the_tokenizers_own_end_token_counts_too(token: str, tmp_path: Path) -> None:
    files = {
        "generation_config.json": b'{"eos_token_id": 2}',
        "tokenizer_config.json": f'{{"eos_token": {token}}}'.encode(),
        "tokenizer.json": b'{"added_tokens": [{"id": 1, "content": "<pad>"}, {"id": 9, "content": "<end>"}]}',
    }
    assert eos_ids(make_base(tmp_path / "base", **files)) == (2, 9)


# ── model.prepare

PREPARE = """
import json, pathlib, sys, time, beside
def make(folder):
    print("step 1 of 1", flush=True)
    with open(pathlib.Path(__file__).parent / "calls", "a") as calls:
        calls.write("x")
    time.sleep(beside.PAUSE)
    beside.make(folder)
def fails(folder):
    raise ValueError("no luck")
def half(folder):
    (folder / "config.json").write_text("{}")
def forever(folder):
    (pathlib.Path(__file__).parent / "began").touch()
    time.sleep(3600)
"""
BESIDE = """
PAUSE = 0.3
def make(folder):
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
FILES = """


@pytest.fixture
def project(tmp_path: Path) -> Path:
    base = make_base(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in base.iterdir()}
    (tmp_path / "prepare.py").write_text(PREPARE)
    (tmp_path / "beside.py").write_text(BESIDE + repr(files))
    return tmp_path


def left_over(project: Path) -> list[str]:
    known = {"model", "prepare.py", "beside.py", "calls", "base", "base.lock", "began"}
    return sorted({path.name for path in project.iterdir()} - known)


def resolving(spec: str, project: Path) -> subprocess.Popen[bytes]:
    """Another process that does the same."""
    code = (
        "import sys, pathlib, tests.run.test_base_model as t\n"
        "t.resolve_base(t.config('base', prepare=sys.argv[1]), pathlib.Path(sys.argv[2]))"
    )
    return subprocess.Popen([sys.executable, "-c", code, spec, str(project)])


def test_a_missing_base_is_prepared_once_and_its_lines_come_through(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert resolve_base(config("base", prepare="prepare.py:make"), project) == project / "base"
    assert (project / "calls").read_text() == "x"
    assert capfd.readouterr().out.count("step 1 of 1\n") == 1
    assert fingerprint(project / "base") == fingerprint(project / "model")
    assert left_over(project) == []


def test_several_that_need_it_at_once_prepare_it_once(project: Path) -> None:
    others = [resolving("prepare.py:make", project) for _ in range(2)]
    threads = [
        threading.Thread(target=resolve_base, args=(config("base", prepare="prepare.py:make"), project)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [other.wait(60) for other in others] == [0, 0]
    assert (project / "calls").read_text() == "x"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("prepare.py:fails", "exit code 1"),
        ("prepare.py:half", "no \\*.safetensors"),
        ("prepare.py:nothing", "exit code 2"),
        ("nowhere.py:make", "no file /"),
        ("prepare.make", "was expected"),
        ("package.module:make", "was expected"),
    ],
)
def test_a_preparation_that_fails_leaves_nothing(spec: str, message: str, project: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_base(config("base", prepare=spec), project)
    assert spec in str(caught.value)
    assert not (project / "base").exists()
    assert left_over(project) == []


def test_what_a_killed_one_left_is_no_model(project: Path) -> None:
    (project / ".base.part").mkdir()
    (project / ".base.part" / "config.json").write_text("torn")
    resolve_base(config("base", prepare="prepare.py:make"), project)
    assert fingerprint(project / "base") == fingerprint(project / "model")


@pytest.mark.anyio
async def test_a_cancelled_preparation_ends_its_process(project: Path) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, resolve_base, config("base", prepare="prepare.py:forever"), project)
        while not await anyio.Path(project / "began").exists():  # noqa: ASYNC110 - another process makes it
            await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()  # and the group waits for the thread
    assert left_over(project) == []


def test_a_preparation_does_not_outlive_a_killed_grpod(project: Path) -> None:
    with resolving("prepare.py:forever", project) as grpod:
        while not (project / "began").exists():
            time.sleep(0.01)
        children = Path(f"/proc/{grpod.pid}/task/{grpod.pid}/children").read_text().split()
        assert len(children) == 1
        grpod.kill()
    while (stat := Path(f"/proc/{children[0]}/stat")).exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)  # pytest's time-out is the judge


# ── the Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Answers everything with `answer`: (status, X-Error-Code); counts its requests."""
    state: dict[str, Any] = {"answer": (500, ""), "asked": 0}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state["asked"] += 1
            self.send_response(state["answer"][0])
            self.send_header("X-Error-Code", state["answer"][1])
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *a: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield state
        server.shutdown()


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((404, "RepoNotFound"), ConfigError, "the Hub has no such model"),
        ((404, "RevisionNotFound"), ConfigError, "at revision 'v9'.*no such revision"),
        ((403, "GatedRepo"), ConfigError, "gated"),
        ((418, ""), NotReady, "the Hub does not deliver it: HfHubHTTPError"),
    ],
)
def test_what_the_hub_says_is_said(
    hub: dict[str, Any], answer: tuple[int, str], error: type[Exception], message: str, tmp_path: Path
) -> None:
    hub["answer"] = answer
    with pytest.raises(error, match=message) as caught:
        resolve_base(config("someone/model", revision="v9"), tmp_path)
    assert hub["asked"]
    assert "\n" not in str(caught.value)
    assert f"no folder {tmp_path}/someone/model" in str(caught.value)


def test_without_a_network_it_is_not_ready(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NotReady, match=r"the Hub does not deliver it: ConnectError"):
        resolve_base(config("someone/model"), tmp_path)


def test_offline_only_the_cache_is_looked_at(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        resolve_base(config("someone/model"), tmp_path)
    cached = tmp_path / "cache" / "models--someone--model"
    snapshot = make_base(cached / "snapshots" / ("a" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    assert resolve_base(config("someone/model"), tmp_path) == snapshot
    assert not hub["asked"]


@pytest.mark.parametrize(
    ("config", "meant"),
    [({"dtype": "float32"}, "float32"), ({"torch_dtype": "bfloat16"}, "bfloat16"), ({}, "auto")],
)
def test_auto_is_what_the_base_was_saved_in(tmp_path: Path, config: dict[str, str], meant: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert weights_dtype(tmp_path, "auto") == meant
    assert weights_dtype(tmp_path, "float16") == "float16"
