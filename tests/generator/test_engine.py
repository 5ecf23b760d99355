"""Which engine answers a generator, on which devices; and what is wrong with that is said before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from grpod import config_engine
from grpod.config import Config
from grpod.errors import ConfigError, NotReady
from grpod.generator import engine


def config(executable: str = "sh", args: tuple[str, ...] = (), **more: Any) -> Config:  # `sh`: a command that is there
    generator = {"engine": "vllm", "vllm": {"executable": executable, "args": args}, **more.pop("generator", {})}
    return Config.model_validate({"generator": generator, **more})


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its /dev."""
    monkeypatch.setattr(config_engine, "Path", lambda path: tmp_path / path.removeprefix("/dev").removeprefix("/"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_a_command_that_is_not_there_is_said_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"vllm.executable '/no/such/vllm' is no command here: .*pip install"):
        engine.vllm_spec(config("/no/such/vllm"), Path("base"), "cpu", "r", learner_here=False)


@pytest.mark.parametrize(
    ("device", "learner", "here", "shared"),
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
    machine: Path, device: str, learner: str, here: bool, shared: bool
) -> None:
    (machine / "nvidia0").touch()
    with structlog.testing.capture_logs() as logs:
        spec = engine.vllm_spec(config(learner={"device": learner}), Path("base"), device, "r", learner_here=here)
    assert ("--gpu-memory-utilization" in spec.command(1)) == shared
    assert [line["gpus"] for line in logs if line["event"] == "gpu_shared_with_learner"] == (
        [device.split("+")] if shared else []
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


def test_a_length_that_the_model_has_no_positions_for_is_refused_before_vllm_starts(tmp_path: Path) -> None:
    made = config(model={"max_model_len": 4096})
    for fields, fits in (
        ({"max_position_embeddings": 4096}, True),
        ({"max_position_embeddings": 2048}, False),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, True),
        ({}, True),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        if fits:
            assert engine.vllm_spec(made, tmp_path, "cpu", "r", learner_here=False)
        else:
            with pytest.raises(ConfigError, match=r"model.max_model_len 4096: .* has positions for 2048 tokens"):
                engine.vllm_spec(made, tmp_path, "cpu", "r", learner_here=False)


@pytest.mark.anyio
async def test_a_server_that_is_not_there_is_told_of_at_once_and_at_the_end() -> None:
    remote = engine.Remote("http://127.0.0.1:1", 0.7, lambda: None)
    with (
        structlog.testing.capture_logs() as logs,
        pytest.raises(NotReady, match=r"http://127.0.0.1:1 was not healthy .*Connect"),
    ):
        await remote.ready()
    told = [line["error"] for line in logs if line["event"] == "replica_not_healthy"]
    assert len(told) == 1, "once, while it is the same"
    assert remote.trouble in told
