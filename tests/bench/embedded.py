"""python -m tests.bench.embedded [--model FOLDER]: completion tokens a second of the embedded replica, over HTTP.

Without a folder: the quickstart's shape (0.4 M parameters), untrained. Completions do not end early, so that the tokens are
counted that were asked for. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import anyio

from tests.models import make_tiny_base
from tests.replica.embedded.made import make_adapter


@dataclass(frozen=True, kw_only=True)
class Load:
    name: str
    groups: int  # requests at once
    n: int
    max_tokens: int
    prompt: int = 16
    adapters: int = 1


LOADS = (
    Load(name="one completion", groups=1, n=1, max_tokens=32),
    Load(name="recipe A: 16 x 8 x 4", groups=16, n=8, max_tokens=4),
    Load(name="the same, under two adapters", groups=16, n=8, max_tokens=4, adapters=2),
    Load(name="recipe B: 4 x 8 x 12", groups=4, n=8, max_tokens=12, prompt=40),
    Load(name="16 x 1 x 64", groups=16, n=1, max_tokens=64),
    Load(name="8 x 8 x 64", groups=8, n=8, max_tokens=64, prompt=64),
)


async def one(http: aiohttp.ClientSession, load: Load, at: int) -> None:
    body = {"model": f"v{at % load.adapters}", "prompt": [(7 * at + i) % 200 + 3 for i in range(load.prompt)], "n": load.n}
    body |= {"max_tokens": load.max_tokens, "ignore_eos": True, "seed": at, "logprobs": 0, "return_token_ids": True}
    async with http.post("/v1/completions", json=body) as response:
        answer = await response.json()
        assert answer["usage"]["completion_tokens"] == load.n * load.max_tokens


async def measure(http: aiohttp.ClientSession, load: Load, seconds: float) -> float:
    """Rounds of all requests at once, as a step of on-policy training makes them."""
    rounds, began = 0, 0.0
    while rounds < 2 or time.perf_counter() - began < seconds:
        if rounds == 1:
            began = time.perf_counter()  # the first round warms up
        async with anyio.create_task_group() as tasks:
            for at in range(load.groups):
                tasks.start_soon(one, http, load, at)
        rounds += 1
    return (rounds - 1) * load.groups * load.n * load.max_tokens / (time.perf_counter() - began)


async def measure_all(url: str, folders: list[Path], loads: list[Load], seconds: float) -> dict[str, float]:
    figures = {}
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http:
        for at, folder in enumerate(folders):
            async with http.post("/v1/load_lora_adapter", json={"lora_name": f"v{at}", "lora_path": str(folder)}) as response:
                assert response.status == 200, await response.text()
        print(f"{'load':<30} {'tok/s':>8}")
        for load in loads:
            figures[load.name] = round(await measure(http, load, seconds))
            print(f"{load.name:<30} {figures[load.name]:>8}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", default="0")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", default="", help="loads whose name has this in it")
    args = parser.parse_args()
    loads = [load for load in LOADS if args.only in load.name]
    with tempfile.TemporaryDirectory() as temporary:
        base = args.model or make_tiny_base(Path(temporary, "base"), hidden=128, layers=2)
        folders = [make_adapter(base, Path(temporary, f"v{at}"), seed=at) for at in range(2)]
        command = [sys.executable, "-m", "grpod.replica.embedded", "--model", str(base), "--port", "0", "--dtype", args.dtype]
        with subprocess.Popen([*command, "--threads", args.threads], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            print(line := process.stdout.readline().strip())
            figures = anyio.run(measure_all, line.split()[-1], folders, loads, args.seconds)
            process.terminate()
    print(json.dumps({"bench": "embedded", "model": str(args.model or "tiny"), "tok_per_s": figures}))


if __name__ == "__main__":
    main()
