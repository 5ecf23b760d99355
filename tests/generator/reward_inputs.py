"""Reward functions of every kind, for a group of 4; tests name them as reward_inputs.py:FUNCTION."""

import asyncio
import collections
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time


def ints(completions, **_):
    return [1, 0, 0, 1]


def bools(completions, **_):
    return [True, False, False, True]


def numpy_array(completions, **_):
    import numpy as np

    return np.array([1, 0, 0, 1], dtype=np.float32)


def numpy_scalars(completions, **_):
    import numpy as np

    return [np.float64(1), np.float32(0), np.int64(0), np.bool_(True)]


def tuple_(completions, **_):
    return (1.0, 0.0, 0.0, 1.0)


async def coroutine(completions, **_):
    await asyncio.sleep(0.01)
    return [1.0, 0.0, 0.0, 1.0]


def awaitable(completions, **_):
    return coroutine(completions)


def strict_signature(completions):
    return [1.0, 0.0, 0.0, 1.0]


def one(completions, **_):
    return [1.0]


def five(completions, **_):
    return [1.0, 0.0, 0.0, 1.0, 1.0]


def scalar(completions, **_):
    return 1.0


def strings(completions, **_):
    return ["1", "0", "0", "1"]


def four_letters(completions, **_):
    return "1001"


def dict_(completions, **_):
    return {"score": [1.0, 0.0, 0.0, 1.0]}


def nothing(completions, **_):
    return None


def nested(completions, **_):
    return [[1.0], [0.0], [0.0], [1.0]]


def nested_array(completions, **_):
    import numpy as np

    return np.array([[1.0], [0.0], [0.0], [1.0]])


def some_none(completions, **_):
    return [1.0, None, 0.0, None]


def other(completions, **_):
    return [0.0, 0.5, 0.0, 1.0]


def all_none(completions, **_):
    return [None] * 4


def one_nan(completions, **_):
    return [1.0, float("nan"), 0.0, 0.0]


def one_inf(completions, **_):
    return [1.0, float("inf"), 0.0, 0.0]


def huge_int(completions, **_):
    return [10**400, 0, 0, 1]


def unprintable_int(completions, **_):
    return [10**9000, 0, 0, 1]


def beyond_float32(completions, **_):
    return [1e39, 0, 0, 1]


def near_float32(completions, **_):
    return [3e38, 0, 0, 1]


def raises(completions, **_):
    raise ValueError("bad row")


def raises_at_first(completions, marker, **_):
    """Fails until it has left its mark: an endpoint that was down for a moment."""
    if os.path.exists(marker[0]):
        return [1.0, 0.0, 0.0, 1.0]
    open(marker[0], "w").close()
    raise ConnectionError("not yet")


def exits(completions, **_):
    sys.exit(3)


def dies_of_bad(prompts, completions, **_):
    if prompts[0] == "bad":
        os.kill(os.getpid(), signal.SIGSEGV)
    return [1.0] * 4


def needs_missing_column(completions, no_such_column, **_):
    return [1.0] * 4


def needs_answer(completions, answer):
    return [float(gold is not None) for gold in answer]


def by_prompt(prompts, completions, **_):
    """Fails for the prompt `bad` alone."""
    return [1.0] if prompts[0] == "bad" else [1.0, 0.0, 0.0, 1.0]


def with_options(completions, *, bonus, answer="none"):
    return [bonus if answer == "none" else -1.0] * 4


def trl(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
    log_metric("seen", 1.0)
    log_extra("seen", completions)
    return [float(trainer_state is None and len(ids) == 2 and sorted(columns) == ["answer"]) for ids in completion_ids]


def prints(completions, **_):
    print("user code prints to stdout")
    os.write(1, b"\x00\x00\x00\x01 and writes bytes to fd 1\n")
    subprocess.run([sys.executable, "-c", "print('so does its child')"], check=True)
    return [float(sys.stdin.read() == "")] * 4


def changes_arguments(prompts, completions, meta, **_):
    """Writes into its first prompt; the others must be their own."""
    prompts[0].append("spoilt")
    meta[0]["spoilt"] = True
    return [float(len(prompt) == 1 and not value.get("spoilt")) for prompt, value in zip(prompts, meta, strict=True)]


def messages(prompts, completions, **_):
    """1 where prompt and completion are lists of messages."""
    return [
        float(prompt[-1]["role"] == "user" and completion[0]["role"] == "assistant" and completion[0]["content"] == f"c{i}")
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]


def same_worker(completions, **_):
    return [float(os.getpid())] * 4


def torch_free(completions, **_):
    return [float("torch" not in sys.modules and "transformers" not in sys.modules)] * 4


def hangs(prompts, completions, **_):
    """A prompt that holds HANG n hangs in way n: no time-out within Python ends all of them."""
    match = re.search(r"HANG (\d)", str(prompts[0]))
    way = int(match[1]) if match else -1
    if way == 0:
        while True:
            pass
    if way == 1:
        collections.deque(itertools.repeat(0), maxlen=0)  # one call in C without end: keeps the GIL, runs no handler
    if way == 2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(10**6)
    while way == 3:
        with contextlib.suppress(BaseException):
            time.sleep(3600)
    return [float(i % 2) for i, _ in enumerate(completions)]


def hangs_with_children(completions, pid_file, **_):
    """Its children do not die with its process group: one is in a session of its own, and ignores signals."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(10**6)"
    children = [subprocess.Popen([sys.executable, "-c", code], start_new_session=own) for own in (False, True)]
    with open(pid_file[0], "w") as file:
        file.write(" ".join(str(pid) for pid in (os.getpid(), *(child.pid for child in children))))
    collections.deque(itertools.repeat(0), maxlen=0)
