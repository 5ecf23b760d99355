"""One value of every format, as the golden files hold it. It does not change: what stands in buckets does not either."""

from __future__ import annotations

from grpod.wire.adapter import Adapter, FileRef, Lora, Probe
from grpod.wire.checkpoint import Checkpoint, Cursor, Trainer
from grpod.wire.doc import Document
from grpod.wire.lease import Beat, Claim, Holder, ResumedFrom
from grpod.wire.rollout import Drop, Group, Rollout, Sampling, Shipment
from grpod.wire.run import Final, Run, Stop
from grpod.wire.state import GeneratorState, LearnerState, ProxyState
from grpod.wire.tables import End, Metric

RUN_ID, FINGERPRINT, WHEN = "0123456789ab", "f" * 64, 1790000000.25
FILES = {"adapter_model.safetensors": FileRef(size=1234, sha256="a" * 64)}
STATE_FILES = {
    **FILES,
    "optimizer.safetensors": FileRef(size=5678, sha256="b" * 64),
    "trainer.json": FileRef(size=90, sha256="c" * 64),
}

DOCUMENTS: dict[str, Document] = {
    "run.json": Run(
        run_id=RUN_ID,
        config={"run": {"max_lag": 4}, "learner": {"learning_rate": 1e-05}, "rewards": [{"function": "math"}]},
        base_fingerprint=FINGERPRINT,
        inputs={"prompts.jsonl": "b" * 64},
        created_at=WHEN,
    ),
    "final.json": Final(
        run_id=RUN_ID,
        epoch=2,
        step=80,
        version=81,
        base_fingerprint=FINGERPRINT,
        files=FILES,
        ledger=["ledger/e000001/s00000040.parquet", "ledger/e000002/s00000081.parquet"],
        reason="steps",
        created_at=WHEN,
    ),
    "stop.json": Stop(reason="enough", created_at=WHEN),
    "adapter.json": Adapter(
        run_id=RUN_ID,
        version=7,
        epoch=2,
        pos=5,
        step=7,
        base_fingerprint=FINGERPRINT,
        lora=Lora(r=8, alpha=16.0, targets=["q_proj", "v_proj"]),
        files=FILES,
        probe=Probe(token_ids=[1, 2, 3], logprobs=[-0.5, -1.25], base_logprobs=[-0.75, -1.5]),
        created_at=WHEN,
    ),
    "checkpoint.json": Checkpoint(
        run_id=RUN_ID,
        step=7,
        epoch=2,
        version=7,
        version_epoch=2,
        pos=5,
        base_fingerprint=FINGERPRINT,
        files=STATE_FILES,
        ledger=["ledger/e000001/s00000003.parquet"],
        created_at=WHEN,
    ),
    "trainer.json": Trainer(
        step=7,
        version=7,
        pos=5,
        cursors={"g1": Cursor(low=3, done=[5, 6])},
        begun={"g1": 40},
        ended={"g1": 33},
        scheduler={"last_epoch": 7, "base_lrs": [0.001]},
        rng={"torch": "00ff"},
    ),
    "claim.json": Claim(
        run_id=RUN_ID,
        epoch=2,
        nonce="00112233aabbccdd",
        holder=Holder(host="gpu-1", boot_id="6f1c", pid_ns="pid:[4026531836]", pid=4711, start_ticks=123456, job_id="68b1"),
        resumed_from=ResumedFrom(step=3, version=3, epoch=1, pos=3),
        first_version=6,
        changes={"learner.steps": 80},
        created_at=WHEN,
    ),
    "beat.json": Beat(nonce="00112233aabbccdd", epoch=2, counter=17, released=True),
    "learner_state.json": LearnerState(
        epoch=2,
        counter=99,
        step=7,
        version=7,
        pos=5,
        credits={"g1": 48, "g2": 16},
        low={"g1": 3},
        retired=["g0"],
        waiting_for=2,
        steps=80,
        updated_at=WHEN,
    ),
    "generator_state.json": GeneratorState(
        generator="g1",
        counter=12,
        begun=41,
        open=["g1/39", "g1/40"],
        next_seq=7,
        resident=["6-2", "7-2"],
        refused=["5-1"],
        url="http://10.0.0.1:8001",
        device="cuda:0",
        ended="SIGTERM",
        started_at=WHEN - 600,
        updated_at=WHEN,
        period_s=5.0,
    ),
    "proxy_state.json": ProxyState(
        counter=3, urls=["http://10.0.0.2:8000"], replicas={"http://10.0.0.1:8001": "healthy"}, updated_at=WHEN
    ),
}

GROUP = Group(
    run_id=RUN_ID,
    group_id="g1/3",
    group_size=2,
    prompt_id="row-5",
    data_epoch=1,
    prompt_row=5,
    prompt_ids=(5, 6, 7),
    policy_version=7,
    policy_epoch=2,
    adapter_sha256="a" * 64,
    sampling=Sampling(temperature=1.0, top_p=0.95, top_k=40, max_new_tokens=4),
    generator="g1",
    created_at=WHEN,
    timing={"generate_s": 1.5, "score_s": 0.25},
    rollouts=(
        Rollout(
            completion_ids=(9, 10, 2),
            generator_logprobs=(-0.5, 0.0, -2.0),
            loss_mask=(1, 0, 1),
            reward=1.0,
            rewards={"format": 1.0, "math": 1.0},
            finish_reason="stop",
            seed=17,
            extra='{"tool": "none"}',
        ),
        Rollout(
            completion_ids=(11, 12, 2),
            generator_logprobs=(-1.0, -1.5, -0.25),
            loss_mask=(1, 1, 1),
            reward=0.0,
            rewards={"format": None, "math": 0.0},
            finish_reason="length",
            seed=18,
        ),
    ),
)
SHIPMENT = Shipment(base_fingerprint=FINGERPRINT, groups=(GROUP,), drops=(Drop(group_id="g1/2", reason="reward_timeout"),))
ENDS = [
    End(group_id="g1/0", end="trained", step=1),
    End(group_id="g1/1", end="dropped", step=1, reason="zero_spread"),
]
METRICS = [Metric(time=WHEN, step=1, name="reward", value=0.125), Metric(time=WHEN, step=1, name="loss", value=-0.5)]
