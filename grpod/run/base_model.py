"""The base model: a local folder, whichever way it comes, and a fingerprint that is the same wherever it lies.

    model.base is a path    the folder; if it is missing, `model.prepare` makes it: once, under a lock, whole or not at all
    else                    a Hub id: huggingface_hub's cache, downloaded when it is not there

All functions block: call them in a worker thread. There, a cancellation ends a preparation and the wait for its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.from_thread

from grpod.config import Config, resolve
from grpod.errors import ConfigError, NotReady
from grpod.run import prepare
from grpod.telemetry.log import get_logger

CONFIG, GENERATION_CONFIG, INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
_VOLATILE = ("_name_or_path", "transformers_version")  # of config.json: who saved it, not what it is
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WHOLE_FILE = 16 << 20  # bytes; of a larger file of weights only samples are hashed
_SAMPLES, _SAMPLE = 16, 64 << 10
_POLL_S = 0.1


def resolve_base(config: Config, folder: Path) -> Path:
    """`folder`: of the config file. Raises `ConfigError`; `NotReady` when the Hub cannot be reached."""
    base = config.model.base
    if not base:
        raise ConfigError("model.base is missing: the base model, a folder or a Hub id")
    path = resolve(base, folder)
    if config.model.prepare and not path.exists():
        return _prepare(path, config.model.prepare, folder)
    if path.exists():
        if lacking := missing(path):
            raise ConfigError(f"model.base {base!r}: {path} is no model folder, it has no {lacking}")
        return path
    if base.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(base):
        raise ConfigError(f"model.base {base!r}: no folder {path} (looked for its {CONFIG})")
    return _download(base, config.model.revision, path)


def missing(folder: Path) -> str | None:
    """What keeps this from being a model folder, in words."""
    if not (folder / CONFIG).is_file():
        return CONFIG
    if not _weights(folder):
        return "*.safetensors (other formats of weights are not read)"
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return "tokenizer (tokenizer.json, tokenizer.model or vocab.json)"
    return None


def fingerprint(folder: Path) -> str:
    """sha256 of config, tokenizer, and every tensor's name, type and shape, with samples of the weights: quick, and the same on
    every machine for the same revision. It tells a fine-tuned model from its base, too."""
    total = hashlib.sha256()

    def add(name: str, data: bytes) -> None:
        total.update(f"{name}:{len(data)}:".encode() + data)

    config = {key: value for key, value in _json(folder / CONFIG).items() if key not in _VOLATILE}
    add(CONFIG, json.dumps(config, sort_keys=True).encode())
    for name in _TOKENIZERS:
        if (folder / name).is_file():
            add(name, (folder / name).read_bytes())
    for path in _weights(folder):
        add(path.name, json.dumps(_header(path), sort_keys=True).encode())
        for sample in _content(path):
            add("", sample)
    return total.hexdigest()


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Every token that ends a completion, as an engine sees it: those of the generation config (else of the config), and the
    tokenizer's own. Empty: none is known, only the length ends one."""
    found = _json(folder / GENERATION_CONFIG).get("eos_token_id")
    config = _json(folder / CONFIG)
    if found is None:
        found = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    ids = [found] if isinstance(found, int) else list(found or ())
    token = _json(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = _json(folder / "tokenizer.json").get("added_tokens") or ()
    ids += [entry["id"] for entry in added if text is not None and entry.get("content") == text]
    return tuple(dict.fromkeys(ids))


def max_positions(folder: Path) -> int | None:
    """Tokens that the model has positions for; None where its config does not tell, or scales them."""
    config = _json(folder / CONFIG)
    text = config.get("text_config") or config
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    scaled = isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type", "default")) != "default"
    found = text.get("max_position_embeddings")
    return found if isinstance(found, int) and not scaled else None


def weights_dtype(folder: Path, dtype: str) -> str:
    """What `dtype` means for this base: of `auto`, the one that its config names, as the learner loads it. vLLM's own `auto`
    makes 16 bits of 32, which would be trained on as noise."""
    config = _json(folder / CONFIG)
    named = config.get("dtype") or config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype")
    return str(named).removeprefix("torch.") if dtype == "auto" and named else dtype


def _weights(folder: Path) -> list[Path]:
    """The files that transformers and vLLM load: those of the index, else all that lie there."""
    names = sorted(set((_json(folder / INDEX).get("weight_map") or {}).values())) or ["model.safetensors"]
    found = [folder / name for name in names]
    return found if all(path.is_file() for path in found) else []


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= path.stat().st_size - 8:
            raise ConfigError(f"{path} is no safetensors file, or is cut")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {"size": path.stat().st_size, "tensors": header}


def _content(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE_FILE:
            yield file.read()
            return
        for n in range(_SAMPLES):
            file.seek((size - _SAMPLE) * n // (_SAMPLES - 1))
            yield file.read(_SAMPLE)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON object was expected")
    return value


def _prepare(base: Path, spec: str, folder: Path) -> Path:
    where, _, function = spec.rpartition(":")
    file = resolve(where, folder)
    if not where.endswith(".py") or not function.isidentifier():
        raise ConfigError(f'model.prepare {spec!r}: "file.py:function" was expected')
    if not file.is_file():
        raise ConfigError(f"model.prepare {spec!r}: no file {file}")
    base.parent.mkdir(parents=True, exist_ok=True)
    with _locked(base.parent / f"{base.name}.lock"):
        if base.exists():  # made while this process waited
            return base
        log = get_logger()
        log.info("base_model_being_prepared", folder=str(base), function=spec)
        part = base.parent / f".{base.name}.part"
        shutil.rmtree(part, ignore_errors=True)  # of one that was killed: the lock is ours
        part.mkdir()
        try:
            code = _run(file, function, part)
            if code:
                raise ConfigError(f"model.prepare {spec!r} failed with exit code {code}: its own message stands above")
            if lacking := missing(part):
                raise ConfigError(f"model.prepare {spec!r} made no model folder: it has no {lacking}")
            part.rename(base)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        log.info("base_model_prepared", folder=str(base))
    return base


def _run(file: Path, function: str, folder: Path) -> int:
    command = [sys.executable, "-P", prepare.__file__, str(file), function, str(folder), json.dumps(sys.path)]
    # a group of its own: a Ctrl-C is for grpod, which then closes the pipe
    with subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0) as child:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(_POLL_S)
                _check_cancelled()
        finally:
            child.kill()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    told = False
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    get_logger().info("waiting_for_base_model", lock=str(path))
                told = True
                _check_cancelled()
                time.sleep(_POLL_S)
        yield


def _check_cancelled() -> None:
    with contextlib.suppress(RuntimeError):  # no worker thread of anyio: nobody could cancel
        anyio.from_thread.check_cancelled()


def _download(base: str, revision: str | None, path: Path) -> Path:
    import httpx2  # huggingface_hub's own client; both take a while to import
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = f"model.base {base!r}{f' at revision {revision!r}' if revision else ''}: no folder {path}"
    try:
        found = Path(
            snapshot_download(
                base,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
                ignore_patterns=["*/*"],
            )
        )
    except GatedRepoError as error:
        raise ConfigError(f"{what}, and on the Hub it is gated: accept its terms there and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{what}, and the Hub has no such revision") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"{what}, and the Hub has no such model (or it is private and HF_TOKEN may not read it)") from error
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(f"{what}, not in the local cache, and HF_HUB_OFFLINE forbids to ask the Hub") from error
        raise NotReady(
            f"{what}, not in the local cache, and the Hub does not deliver it: {_one_line(error.__cause__ or error)}"
        ) from error
    except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        raise NotReady(f"{what}, and the Hub does not deliver it: {_one_line(error)}") from error
    if lacking := missing(found):
        raise ConfigError(f"{what}, and on the Hub it has no {lacking}")
    return found


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
