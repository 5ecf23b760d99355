"""Which GPUs a replica works on; and what is wrong with that is said before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpod import config_engine
from grpod.config_engine import check_args, check_devices, gpus_of
from grpod.errors import ConfigError


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its /dev."""
    monkeypatch.setattr(config_engine, "Path", lambda path: tmp_path / path.removeprefix("/dev").removeprefix("/"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize("device", ["", "auto", "cuda"])
def test_without_a_choice_it_is_the_first_gpu_where_there_is_one(
    machine: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    (machine / "nvidiactl").touch()
    assert gpus_of(device) == ()
    (machine / "nvidia0").touch()
    assert gpus_of(device) == ("cuda:0",)
    assert gpus_of("cpu") == ()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert gpus_of(device) == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert gpus_of(device) == ("cuda:0",)


def test_amd_has_a_device_of_its_own(machine: Path) -> None:
    (machine / "kfd").touch()
    assert gpus_of("") == ("cuda:0",)


@pytest.mark.parametrize(
    ("device", "gpus"),
    [
        ("cpu", ()),
        ("0", ("cuda:0",)),
        ("cuda:1", ("cuda:1",)),
        ("cuda:0+cuda:1", ("cuda:0", "cuda:1")),
        ("0 + 1", ("cuda:0", "cuda:1")),
        ("GPU-8f2c-1", ("GPU-8f2c-1",)),
    ],
)
def test_a_device_is_one_gpu_or_several_that_work_as_one(device: str, gpus: tuple[str, ...]) -> None:
    assert gpus_of(device) == gpus


@pytest.mark.parametrize("device", ["gpu0", "cuda:", "cuda:0+", "cuda:0,cuda:1", "cuda:0+cpu"])
def test_what_is_no_device_is_said(device: str) -> None:
    with pytest.raises(ConfigError, match=r"generator.devices: .* is no device"):
        check_devices([device], parallel=True)


def test_no_gpu_belongs_to_two_replicas() -> None:
    check_devices(["cuda:0", "cuda:1", "cpu", "cpu"], parallel=False)
    for twice in (["cuda:0", "0"], ["cuda:0+cuda:0"], ["cuda:0+cuda:1", "cuda:1"]):
        with pytest.raises(ConfigError, match=r"names cuda:\d 2 times"):
            check_devices(twice, parallel=True)


def test_several_gpus_as_one_are_for_vllm() -> None:
    with pytest.raises(ConfigError, match=r"'cuda:0[+]cuda:1': only generator.engine vllm"):
        check_devices(["cuda:0+cuda:1"], parallel=False)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--port", "8000"], ("--port", "by itself")),
        (["--api_key=secret"], ("--api_key=secret", "by itself")),
        (["--served-model-name=x"], ("--served-model-name=x",)),
        (["--no-enable-lora"], ("--no-enable-lora",)),
        (["--seed", "1", "--max-num-seqs 64"], ("'--max-num-seqs 64'", "two entries, '--max-num-seqs' and '64'")),
    ],
)
def test_what_would_keep_grpod_from_its_child_is_refused(args: list[str], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_args(args)
    assert all(word in str(caught.value) for word in ("generator.vllm.args", *words))


def test_other_arguments_are_passed_on() -> None:
    check_args(["--max-num-seqs", "64", '--hf-overrides={"a b": 1}', "--model-loader-extra-config", '{"--port": 1}'])
