"""URL -> bucket: odd names end the same way on every backend."""

from __future__ import annotations

import pytest

from grpod.bucket.file import FileBucket
from grpod.bucket.memory import MemoryBucket
from grpod.bucket.open import open_bucket, run_folder
from grpod.errors import ConfigError

BACKENDS = [
    "memory://{}",
    "file:///tmp/runs/{}",
    "file://./runs/{}",
    "/tmp/runs/{}",
    "runs/{}",
    "hf://buckets/ns/name/{}",
    "s3://bucket/{}",
]
ODD = {
    "exp 1": "' '",
    "exp#1": "'#'",
    "exp?1": r"'\?'",
    "exp%2F1": "'%'",
    "\u00e9": "U\\+00E9",
    "e\u0301": "U\\+0301",
    "a//b": "'//'",
    "../x": r"'\.\.'",
    "a/./x": r"'\.'",
    "x" * 300: "300 characters",
    "a:b": "':'",
    ".run": r"'\.' at the start",
    "-run": "'-' at the start",
    "a\n": "U\\+000A",
    "a\\b": "U\\+005C",
    "a//": "'//'",
    "\ud83d": "U\\+D83D",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ODD)
def test_an_odd_folder_is_refused_by_the_same_name_on_every_backend(backend, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=ODD[name]) as caught:
        open_bucket(backend.format(name), folder=tmp_path)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trailing_slash_is_the_same_run(backend):
    for name in ("exp1", "a/b", "Exp_1.2=3+4@5-6", "x" * 200):
        assert run_folder(backend.format(name) + "/") == run_folder(backend.format(name))
    assert run_folder(backend.format("exp1")) != run_folder(backend.format("exp10"))


@pytest.mark.parametrize(
    "url", ["file://{}/runs/demo/", "{}/runs/demo", "file://./runs/demo", "./runs/demo/", "runs/demo", "FILE://./runs/demo"]
)
@pytest.mark.anyio
async def test_a_relative_path_is_relative_to_the_configs_folder(url, tmp_path):
    bucket = open_bucket(url.format(tmp_path), folder=tmp_path)
    assert isinstance(bucket, FileBucket)
    assert bucket.url == f"file://{tmp_path}/runs/demo"
    await bucket.put({"a": b"1"})
    assert (tmp_path / "runs/demo/a").read_bytes() == b"1"


def test_the_folders_above_a_run_may_have_any_name(tmp_path):
    home = tmp_path / "Frau Müller's"
    assert open_bucket(f"file://{home}/exp1").url == open_bucket("exp1", folder=home).url == f"file://{home}/exp1"


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_bucket("~/runs/demo").url == f"file://{tmp_path}/runs/demo"


def test_nothing_is_made_when_the_bucket_must_be_there(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        open_bucket("runs/demo", folder=tmp_path, create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.anyio
async def test_memory_is_shared_by_url():
    bucket = open_bucket("memory://shared/a/")
    assert isinstance(bucket, MemoryBucket)
    await bucket.put({"a": b"1"})
    assert (await open_bucket("memory://shared/a").get("a")).data == b"1"
    assert open_bucket("memory://").url == "memory://"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "run.bucket is not set"),
        ("ftp://host/x", "unknown scheme 'ftp'; known are memory://, file://, hf://, s3://, gs://, az://"),
        ("flie:///tmp/x", "unknown scheme 'flie'"),
        ("hf://buckets/ns/name/run", "hf:// is not in this build yet"),
        ("s3://bucket/run", "s3:// is not in this build yet"),
        ("gs://bucket/run", "not in this build yet"),
        ("az://container/run", "not in this build yet"),
        ("file:/tmp/x", "'//' must follow 'file:'"),
        ("file://runs/x", "write file:///"),
        ("file:///", "a folder must follow"),
        ("s3://", "a folder must follow"),
    ],
)
def test_a_url_that_cannot_be_opened_is_said(url, message, tmp_path):
    with pytest.raises(ConfigError) as caught:
        open_bucket(url, folder=tmp_path)
    assert message in str(caught.value)
