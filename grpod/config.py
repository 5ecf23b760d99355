"""Every key of the config, its default and its meaning: the README's table and `grpod config --schema` are made from here.

Parsed once, strictly (`configure.py`), then trusted. A key is *agreed* (kept in run.json; who joins a run must not differ)
or *local* to the machine: `agreed()` marks the former. An *offered* key is local, but run.json tells it to who joins with
nothing but the run's URL: where the base model and the data set are found by name.

No key is required here: what a role cannot do without, `configure.check_roles` asks for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def agreed(default: Any = ..., *, doc: str, **limits: Any) -> Any:
    return Field(default, description=doc, json_schema_extra={"agreed": True}, **limits)


def local(default: Any = ..., *, doc: str, **limits: Any) -> Any:
    return Field(default, description=doc, json_schema_extra={"agreed": False}, **limits)


def offered(default: Any = ..., *, doc: str) -> Any:
    return Field(default, description=doc, json_schema_extra={"agreed": False, "offered": True})


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number was expected, not yes/no")
    return value


Int = Annotated[int, BeforeValidator(_no_bool)]
Count = Annotated[Int, Field(ge=1)]
Float = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class RunSection(Section):
    bucket: str = local(
        "", doc="URL of the run's folder: file:///path, hf://buckets/ns/name/folder, s3://…; memory:// for tests"
    )
    name: str = local("", doc="a label in every line of the log; not unique")
    max_lag: Int = agreed(4, ge=0, doc="largest lag, in publishes, that is trained on; 0 is on-policy")
    create_bucket: bool = local(True, doc="create the bucket when it is missing")
    from_: str = Field(
        "",
        alias="from",
        description="URL of a run or adapter folder to begin from; not in this build yet",
        json_schema_extra={"agreed": True},
    )
    startup_timeout_s: Float = local(600.0, gt=0, doc="how long a role waits for what it depends on, then exit 75")
    grace_s: Float = local(30.0, gt=0, doc="how long a role may take to end after a signal")
    lease_ttl_s: Float = agreed(30.0, gt=0, doc="a learner that has not beaten for this long may be replaced")
    restart: bool = local(False, doc="begin again at step 0 when no whole checkpoint is left")
    stop_at_reward: Float | None = agreed(None, doc="end the run when the mean reward of 5 steps reaches this")


class ModelSection(Section):
    base: str = offered("", doc="base model: a folder (relative to the config file) or a Hub id")
    revision: str | None = offered(None, doc="revision of a Hub id")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = agreed("auto", doc="of the base model's weights")
    max_model_len: Int = agreed(2048, ge=8, doc="prompt and completion tokens together, at most")
    prepare: str = local("", doc='"file.py:function", called as function(folder) once, under a lock, when base is missing')


class LoraSection(Section):
    rank: Int = agreed(8, ge=1, le=512, doc="rank of the adapter")
    alpha: Float = agreed(16.0, gt=0, doc="scale of the adapter: alpha / rank")
    target_modules: list[str] | Literal["all-linear"] = agreed("all-linear", doc="modules that carry it")
    dropout: Float = agreed(0.0, ge=0, lt=1, doc="on the adapter's input, while training")


class DataSection(Section):
    source: str = offered("", doc="a JSONL or Parquet file, or a data set's Hub id")
    subset: str | None = agreed(None, doc="subset (configuration) of a Hub data set, such as main of openai/gsm8k")
    split: str = agreed("train", doc="split of a Hub data set")
    prompt_column: str = agreed("prompt", doc="a text, or a list of messages")
    order: Literal["shuffle", "epoch"] = agreed("shuffle", doc="shuffle anew in every data epoch, or as it stands")
    seed: Int = agreed(0, doc="of order and sampling")
    limit: Int | None = agreed(None, ge=1, doc="use the first rows only")


class RewardSection(Section):
    function: str = agreed(doc='"package.module:function", "file.py:function", or built in: math, exact_match, format, length')
    weight: Float = agreed(1.0, doc="in the sum over reward functions")
    timeout_s: Float = agreed(10.0, gt=0, doc="for one group; then its worker is killed and the group dropped")
    options: dict[str, Any] = agreed({}, doc="passed to the function by name")


class SamplingSection(Section):
    temperature: Float = agreed(1.0, gt=0, doc="the learner divides its logits by the same")
    top_p: Float = agreed(1.0, gt=0, le=1, doc="nucleus; 1 is off (recommended: the learner does not know the cut)")
    top_k: Int = agreed(0, ge=0, doc="0 is off")
    max_new_tokens: Int = agreed(256, ge=1, doc="a completion that reaches it is truncated")


class VllmSection(Section):
    executable: str = local("vllm", doc="path of the vllm command; may lie in another virtual environment")
    args: list[str] = local([], doc="further arguments, one entry a word; they win over what grpod asks for")
    env: dict[str, str] = local({}, doc="further environment variables; they win, too")


class RemoteSection(Section):
    url: str = local("", doc="of a server that speaks vLLM's HTTP")
    adapter_root: str = local("", doc="path on that host where the bucket's keys lie")
    token_file: str = local("", doc="file with its bearer token; read anew for every request")


class GeneratorSection(Section):
    engine: Literal["embedded", "vllm", "remote"] = local(
        "embedded", doc="embedded: transformers, for CPUs; vllm: started here; remote: a URL"
    )
    group_size: Int = agreed(8, ge=2, doc="rollouts that share a prompt")
    sampling: SamplingSection = agreed(SamplingSection(), doc="how completions are drawn")
    max_in_flight: Count | Literal["auto"] = local("auto", doc="groups in flight at a replica; auto: by its /metrics")
    devices: list[str] = local(
        [], doc="one replica each: cpu, cuda:0, cuda:0+cuda:1 (vllm: as one); empty: one, on the CPU (vllm: on cuda:0, if any)"
    )
    advertise: str = local("", doc="URL under which the proxy reaches the replica; empty: it is not registered")
    idle_exit_s: Float | None = local(None, gt=0, doc="end when there was no credit for so long; empty: never by itself")
    reward_workers: Int = local(2, ge=1, doc="processes that score")
    ship_every_s: Float = local(5.0, gt=0, doc="upper bound of the time that a finished group waits to be shipped")
    state_every_s: Float = local(5.0, gt=0, doc="heartbeat")
    vllm: VllmSection = local(VllmSection(), doc="engine vllm")
    remote: RemoteSection = local(RemoteSection(), doc="engine remote")


class LossSection(Section):
    kind: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = agreed(
        "dapo", doc="denominators: by rollout, by length limit, by token; gspo: ratio by sequence; cispo: clipped weight"
    )
    clip_low: Float = agreed(0.2, ge=0, lt=1, doc="the importance ratio is clipped below 1 - clip_low")
    clip_high: Float = agreed(0.28, ge=0, doc="and above 1 + clip_high")
    correction: Literal["none", "tis", "mask"] = agreed(
        "tis", doc="of engine mismatch and lag: cap the weight, or mask what exceeds it"
    )
    ratio_cap: Float = agreed(2.0, gt=1, doc="of the correction")
    kl_beta: Float = agreed(0.0, ge=0, doc="weight of the KL to the base model")
    advantage_scale: Literal["std", "none"] = agreed(
        "std", doc="divide the centred reward by the group's standard deviation, or not"
    )
    mask_truncated: bool = agreed(True, doc="completions ended by length count in neither numerator nor denominator")


class LearnerSection(Section):
    steps: Int = agreed(100, ge=1, doc="optimizer steps of the run")
    groups_per_step: Int = agreed(16, ge=1, doc="groups in one step")
    zero_spread: Literal["replace", "keep"] = agreed(
        "replace",
        doc="a group whose rewards are all equal teaches nothing: another takes its place; keep: it counts in its step",
    )
    learning_rate: Float = agreed(1e-4, gt=0, doc="peak, AdamW (0.9, 0.95)")
    warmup_steps: Int = agreed(0, ge=0, doc="linear")
    schedule: Literal["constant", "linear", "cosine"] = agreed("constant", doc="after the warm-up")
    weight_decay: Float = agreed(0.0, ge=0, doc="AdamW")
    max_grad_norm: Float = agreed(1.0, gt=0, doc="clip")
    publish_every: Int = agreed(1, ge=1, doc="steps between versions")
    checkpoint_every: Count | Literal["auto"] = agreed("auto", doc="steps; auto: at every publish while it is small (64 MB)")
    keep_checkpoints: Int = agreed(3, ge=1, doc="older ones are deleted")
    give_up_after: Int = agreed(500, ge=1, doc="groups in a row with nothing to learn from; then the learner ends with 75")
    token_budget: Int = agreed(8192, ge=16, doc="tokens of one forward pass; a longer rollout has one of its own")
    device: str = local("auto", doc="auto, cpu, cuda, cuda:1")
    loss: LossSection = agreed(LossSection(), doc="what a step minimises")


class ProxySection(Section):
    listen: str = local("127.0.0.1:8000", doc="host:port; port 0 takes a free one")
    url: str = local("", doc="where generators find it; empty: as state/proxy.json says")
    replicas: list[str] = local([], doc="URLs of replicas that the proxy owns")
    mount: str = local("", doc="folder on the replicas' hosts under which adapters lie")
    quorum: Count | Literal["majority", "all"] = local("majority", doc="replicas that must answer a broadcast")
    token_file: str = local("", doc="bearer token asked of clients")
    retries: Int = local(2, ge=0, doc="other replicas tried for one request")


class TelemetrySection(Section):
    log_level: Literal["debug", "info", "warning", "error"] = local("info", doc="the least that is logged")
    log_format: Literal["auto", "console", "json"] = local("auto", doc="auto: lines on a terminal, JSON elsewhere")
    sinks: list[str] = local([], doc="trackers beside the bucket; not in this build yet")
    price_per_hour: Float | None = local(None, ge=0, doc="of all machines together; not in this build yet")


class Config(Section):
    run: RunSection = agreed(RunSection(), doc="the run, and how long its roles wait")
    model: ModelSection = local(ModelSection(), doc="the frozen base model; asked of generators and the learner")
    lora: LoraSection = agreed(LoraSection(), doc="the adapter that is trained")
    data: DataSection | None = local(None, doc="the prompts; asked of generators")
    rewards: list[RewardSection] = agreed([], doc="the reward functions; asked of generators")
    generator: GeneratorSection = local(GeneratorSection(), doc="prompt to rollout")
    learner: LearnerSection = agreed(LearnerSection(), doc="rollout to adapter")
    proxy: ProxySection = local(ProxySection(), doc="front door to every replica")
    telemetry: TelemetrySection = local(TelemetrySection(), doc="logs and trackers")

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.generator.sampling.max_new_tokens >= self.model.max_model_len:
            raise ValueError(
                f"generator.sampling.max_new_tokens {self.generator.sampling.max_new_tokens} leaves no room for a prompt "
                f"in model.max_model_len {self.model.max_model_len}"
            )
        return self


def resolve(path: str, folder: Path) -> Path:
    """Relative paths of a config are relative to its file's folder."""
    return (folder / Path(path).expanduser()).resolve()
