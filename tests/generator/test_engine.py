"""Which engine answers a generator, on which devices; and what is wrong with that is said before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog

from grpod.config import Config
from grpod.errors import ConfigError
from grpod.generator import engine
from grpod.generator.token_file import TokenFile

NO_TOKEN = TokenFile("generator.remote.token_file", None, Path())


def config(executable: str = "sh", args: tuple[str, ...] = (), **more: Any) -> Config:  # `sh`: a command that is there
    generator = {"engine": "vllm", "vllm": {"executable": executable, "args": args}, **more.pop("generator", {})}
    return Config.model_validate({"generator": generator, **more})


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its /dev."""
    monkeypatch.setattr(engine, "Path", lambda path: tmp_path / path.removeprefix("/dev").removeprefix("/"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize("device", ["", "auto", "cuda"])
def test_without_a_choice_it_is_the_first_gpu_where_there_is_one(
    machine: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    (machine / "nvidiactl").touch()
    assert engine.gpus_of(device) == ()
    (machine / "nvidia0").touch()
    assert engine.gpus_of(device) == ("cuda:0",)
    assert engine.gpus_of("cpu") == ()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert engine.gpus_of(device) == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert engine.gpus_of(device) == ("cuda:0",)


def test_amd_has_a_device_of_its_own(machine: Path) -> None:
    (machine / "kfd").touch()
    assert engine.gpus_of("") == ("cuda:0",)


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
    assert engine.gpus_of(device) == gpus


@pytest.mark.parametrize("device", ["gpu0", "cuda:", "cuda:0+", "cuda:0,cuda:1", "cuda:0+cpu"])
def test_what_is_no_device_is_said(device: str) -> None:
    with pytest.raises(ConfigError, match=r"generator.devices: .* is no device"):
        engine.vllm_spec(config(), Path("base"), device, "r", learner_here=False)


def test_a_command_that_is_not_there_is_said_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"vllm.executable '/no/such/vllm' is no command here: .*pip install"):
        engine.vllm_spec(config("/no/such/vllm"), Path("base"), "cpu", "r", learner_here=False)


def test_arguments_that_are_grpods_own_are_refused_before_that() -> None:
    with pytest.raises(ConfigError, match=r"generator.vllm.args holds '--port=1'"):
        engine.vllm_spec(config("/no/such/vllm", args=("--port=1",)), Path("base"), "cpu", "r", learner_here=False)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("generator", "words"),
    [
        ({"engine": "embedded"}, "'cuda:0[+]cuda:1': only generator.engine vllm"),
        ({"engine": "remote"}, "generator.remote.url is missing"),
    ],
)
async def test_an_engine_that_cannot_do_it_says_so(generator: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        async with engine.open_engine(
            config(generator=generator), Path("base"), device="cuda:0+cuda:1", name="r", token=NO_TOKEN
        ):
            pass


@pytest.mark.parametrize(
    ("devices", "learner", "here", "shared"),
    [
        ("cuda:0", "auto", True, True),
        ("cuda:0", "cuda", True, True),
        ("cuda:0+cuda:1", "cuda:1", True, True),
        ("cuda:0", "cuda:1", True, False),
        ("cuda:0", "cpu", True, False),
        ("cuda:0", "mps", True, False),
        ("cuda:0", "auto", False, False),
        ("cpu", "auto", True, False),
    ],
)
def test_the_gpu_is_shared_where_the_learner_of_this_process_works_on_it(
    machine: Path, devices: str, learner: str, here: bool, shared: bool
) -> None:
    (machine / "nvidia0").touch()
    with structlog.testing.capture_logs() as logs:
        spec = engine.vllm_spec(config(learner={"device": learner}), Path("base"), devices, "r", learner_here=here)
    assert ("--gpu-memory-utilization" in spec.command(1)) == shared
    assert [line["gpus"] for line in logs if line["event"] == "gpu_shared_with_learner"] == (
        [devices.split("+")] if shared else []
    )


def test_a_child_may_take_as_long_as_the_config_says_and_its_log_has_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    spec = engine.vllm_spec(config(run={"startup_timeout_s": 7.0}), Path("base"), "cuda:1", "r", learner_here=False)
    assert (spec.name, spec.startup_timeout_s, spec.env["CUDA_VISIBLE_DEVICES"]) == ("r", 7.0, "7")
    assert spec.level("(EngineCore pid=7) WARNING 12-02 02:28:03 [x.py:1] y") == "warning"
    command = spec.command(8123)
    assert command[:3] == ["sh", "serve", "base"]
    assert command[command.index("--port") + 1] == "8123"


def test_a_remote_server_on_another_host_must_be_told_where_the_adapters_lie() -> None:
    def root(url: str, **more: str) -> str | None:
        return engine.adapter_root(config(generator={"engine": "remote", "remote": {"url": url, **more}}))

    assert root("http://127.0.0.1:8000") is None
    assert root("http://gpu1:8000", adapter_root="/mnt/run") == "/mnt/run"
    with pytest.raises(ConfigError, match=r"generator.remote.adapter_root is missing: http://gpu1:8000"):
        root("http://gpu1:8000")
    assert engine.adapter_root(config()) is None
