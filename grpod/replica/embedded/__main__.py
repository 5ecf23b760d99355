"""python -m grpod.replica.embedded --model FOLDER --port PORT

One process, three parts: the event loop (HTTP), the engine's thread, and short threads that read adapters. It ends with 0 on
SIGTERM and SIGINT, dropping what is in flight (who stops it has drained it), and with 1 when the engine fails.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: a folder is all it may read
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Before torch is: its threads would spin while they wait, and where a learner computes on the same cores each pass then takes
# ten times as long. Sleeping threads cost nothing that could be measured.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import anyio
from aiohttp import web
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal
from transformers.utils.logging import disable_progress_bar

from grpod.replica.embedded.app import Server
from grpod.replica.embedded.engine import Engine
from grpod.replica.embedded.model import TINY, Model
from grpod.replica.embedded.text import Text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m grpod.replica.embedded", description="vLLM's HTTP over transformers.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--served-model-name", default="base")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-model-len", type=int, default=2048, help="prompt and completion tokens together")
    parser.add_argument("--max-loras", type=int, default=6)
    parser.add_argument("--max-lora-rank", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=256, help="completions that decode together")
    parser.add_argument("--kv-cache-gib", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: one for tiny models, else one a core")
    return parser.parse_args()


async def serve(
    args: argparse.Namespace, server: Server, model: Model, *, task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED
) -> None:
    """`task_status` tells the URL once it listens. Ends when cancelled."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = args.threads or (1 if model.num_parameters <= TINY else cores)
    cache_bytes = int(args.kv_cache_gib * (1 << 30))
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        async with BlockingPortal() as portal, anyio.create_task_group() as tasks:

            def post(function: Callable[[], None]) -> None:
                portal.start_task_soon(function)

            engine = Engine(model, post=post, threads=threads, max_rows=args.max_num_seqs, cache_bytes=cache_bytes)
            server.engine = engine
            tasks.start_soon(anyio.to_thread.run_sync, engine.run)
            try:
                await web.TCPSite(runner, args.host, args.port).start()
                host, port = runner.addresses[0][:2]
                task_status.started(f"http://{host}:{port}")
                await anyio.sleep_forever()
            finally:
                engine.stop()
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()


async def main() -> None:
    args = arguments()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model = Model(args.model, dtype=args.dtype, device=args.device)
    server = Server(
        model,
        Text(args.model),
        name=args.served_model_name,
        max_model_len=args.max_model_len,
        max_loras=args.max_loras,
        max_lora_rank=args.max_lora_rank,
    )
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as tasks:
            url: str = await tasks.start(partial(serve, args, server, model))
            print(f"serving {args.model} ({model.num_parameters / 1e6:.1f} M parameters, {model.dtype}) on {url}", flush=True)
            async for _ in signals:
                tasks.cancel_scope.cancel()
                break


if __name__ == "__main__":
    anyio.run(main)
    os._exit(0)  # all is closed; taking torch's modules apart would cost whoever waits for this process seconds
