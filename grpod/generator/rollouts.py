"""One group's life: a prompt and a version in, a whole group out, or one named reason why not.

ask (all of it, one version, one seed) ─▶ check ─▶ score ─▶ Group
  │ away, cut, aborted: asked again under the same version, a few times
  └▶ replica_refused  unusable_answer  replica_unavailable  version_gone  stale_in_flight  reward_*      ─▶ Drop
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import anyio

from grpod.config import Config
from grpod.generator.prompts import Prompt
from grpod.generator.reward import RewardFailure, RewardPool, Scores
from grpod.generator.station import Station
from grpod.generator.tokens import completion_text
from grpod.replica.adapters import Served
from grpod.replica.client import Answer, Choice, CompletionRequest, Refused, Unavailable, UnknownAdapter, UnusableAnswer
from grpod.wire.rollout import Drop, Group, Rollout, Sampling
from grpod.wire.run import Run

ASKED = 4  # times that one group is asked for, at most
_PAUSE_S = 0.2  # before the second; doubled each time


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """What every group of this generator needs."""

    config: Config
    run: Run
    tokenizer: Any
    rewards: RewardPool
    eos_ids: Collection[int]


async def make_group(shop: Workshop, station: Station, served: Served, group_id: str, prompt: Prompt) -> Group | Drop:
    """Raises what ends the generator: RewardsUseless, NotReady."""
    sampling = shop.config.generator.sampling
    seed = _seed(shop.config.data.seed if shop.config.data else 0, group_id)
    begun_at, begun = time.time(), anyio.current_time()
    with station.use(served) as scope:
        answer = await _ask(
            station,
            served,
            CompletionRequest(
                model=served.name,
                prompt_ids=prompt.prompt_ids,
                n=shop.config.generator.group_size,
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=seed,
                stop_token_ids=sorted(shop.eos_ids),
            ),
            prompt.row,
        )
    if scope.cancelled_caught:
        return Drop(group_id=group_id, reason="stale_in_flight")
    if isinstance(answer, str):
        return Drop(group_id=group_id, reason=answer)
    generated = anyio.current_time()
    completions = [choice.token_ids for choice in answer.choices]
    try:
        scores = await shop.rewards.score(prompt, [completion_text(shop.tokenizer, ids) for ids in completions], completions)
    except RewardFailure as failure:
        return Drop(group_id=group_id, reason=failure.reason)
    return Group(
        run_id=shop.run.run_id,
        group_id=group_id,
        group_size=len(completions),
        prompt_id=prompt.prompt_id,
        data_epoch=prompt.data_epoch,
        prompt_row=prompt.row,
        prompt_ids=prompt.prompt_ids,
        policy_version=served.version,
        policy_epoch=served.epoch,
        adapter_sha256=served.sha256,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
        ),
        generator=group_id.rpartition("/")[0],
        created_at=begun_at,
        timing={"generate_s": generated - begun, "score_s": anyio.current_time() - generated},
        rollouts=tuple(_rollout(shop, choice, scores, i, seed) for i, choice in enumerate(answer.choices)),
    )


async def _ask(station: Station, served: Served, request: CompletionRequest, row: int) -> Answer | str:
    """The answer, or the reason why there is none. `row` of the data set, for the log."""
    reason, timed_out = "", 0
    for attempt in range(ASKED):
        if attempt:
            await anyio.sleep(_PAUSE_S * 2 ** (attempt - 1))
        client = await station.holding(served)
        if client is None:
            return "version_gone"
        sent, timeout_s = anyio.current_time(), station.patience.seconds(timed_out)
        try:
            answer = await client.complete(request, timeout_s=timeout_s)
            station.patience.answered(anyio.current_time() - sent)
            return answer
        except UnusableAnswer as error:
            reason = "unusable_answer"
            station.complain("answer_unusable", reason=error.reason, error=str(error))
        except Unavailable as error:
            reason = "replica_unavailable"
            timed_out += anyio.current_time() - sent >= timeout_s
            station.complain("replica_unavailable", reason=str(error.status), error=str(error))
        except UnknownAdapter:
            reason = "replica_unavailable"
            station.forgot()
        except Refused as error:
            station.complain("replica_refused", reason=str(error.status), row=row, error=error.message)
            return "replica_refused"
    return reason


def _rollout(shop: Workshop, choice: Choice, scores: Scores, index: int, seed: int) -> Rollout:
    truncated = choice.truncated(shop.eos_ids)
    trained = not (truncated and shop.config.learner.loss.mask_truncated)
    return Rollout(
        completion_ids=tuple(choice.token_ids),
        generator_logprobs=tuple(choice.logprobs),
        loss_mask=(int(trained),) * len(choice.token_ids),
        reward=scores.totals[index],
        rewards={name: values[index] for name, values in scores.rewards.items()},
        finish_reason="length" if truncated else "stop",
        seed=seed,
    )


def _seed(base: int, group_id: str) -> int:
    """31 bits, another for every group of the run."""
    return int.from_bytes(hashlib.sha256(f"{base}/{group_id}".encode()).digest()[:4], "big") >> 1
