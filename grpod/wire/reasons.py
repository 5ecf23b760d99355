"""Every word under which grpod passes something over, once: the README's table is made from here, a test holds the code to it.

row         a row of the data set that cannot be asked: passed over, counted once in each data epoch, no group is begun
group       a group that ended without being trained on: its row in the ledger says dropped, and this word
object      an object that cannot be read: its bytes and this word stand in quarantine/, its groups end as `quarantined`
part        one group of a readable object that cannot be used: a copy goes to quarantine/, it ends as `quarantined`
answer      a replica's answer that is no completion: asked again; the group is dropped only after that
version     a published version that a replica does not take: its generator goes on with the one before
checkpoint  one that a resume passes over: the newest whole one that counts is taken
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

What = Literal["row", "group", "object", "part", "answer", "version", "checkpoint"]


@dataclass(frozen=True, kw_only=True)
class Reason:
    word: str
    what: What
    by: str  # the role, or the part of it, that says so
    meaning: str  # what happened, and what helps where something does


def _reasons(what: What, by: str, **meanings: str) -> tuple[Reason, ...]:
    return tuple(Reason(word=word, what=what, by=by, meaning=meaning) for word, meaning in meanings.items())


REASONS: Final = (
    *_reasons(
        "row",
        "generator",
        prompt_missing="the row has no such key; see `data.prompt_column`",
        prompt_null="the prompt, or the content of a message, is null",
        prompt_empty="the prompt is empty, or has no token",
        prompt_kind="neither a text nor a list of messages",
        prompt_not_text="half of a surrogate pair: it cannot be written as UTF-8",
        prompt_template="the tokenizer's chat template failed on it",
        prompt_too_long="prompt and `generator.sampling.max_new_tokens` exceed `model.max_model_len`; nothing is cut",
    ),
    *_reasons(
        "group",
        "generator",
        unusable_answer="the replica answered 200 without a completion, each time it was asked; the log has the word (below)",
        replica_unavailable="the replica could not be reached, or answered 5xx, each time it was asked",
        replica_refused="the replica answered 4xx; the log has its message",
        version_gone="the version was unloaded before the group could be asked for again",
        stale_in_flight="it was still being generated when its version was older than `run.max_lag`",
        interrupted="the generator was stopped, and its grace period was over first",
        reward_type="a reward function returned something else than a list of numbers",
        reward_length="it returned too few or too many values",
        reward_not_finite="it returned NaN, an infinity, or more than float32 holds",
        reward_none="no function gave a number for one of the completions",
        reward_error="it raised, or ended its process, each time it was asked",
        reward_timeout="it took longer than `rewards[].timeout_s`; its process was ended",
    ),
    *_reasons(
        "group",
        "learner",
        zero_spread="all rewards are equal: there is nothing to prefer; another group takes its place",
        all_truncated="every completion was cut by length, and `learner.loss.mask_truncated` is on: see `max_new_tokens`",
        all_masked="no token is left under the loss masks",
        stale="its lag was above `run.max_lag` when its turn came",
        foreign_run="it belongs to another run's id",
        foreign_base="it was made with another base model or tokenizer",
        foreign_epoch="its version was published by a learner that had lost its lease",
        unknown_version="no manifest of its version is to be found",
        adapter_hash="its version exists, with other weights",
        token_id="a token id that the model does not have",
        too_long="more tokens than the model has positions",
        not_finite="loss or gradient of its step was not finite: no optimizer step was taken",
        quarantined="it stands in an object, or part of one, that cannot be read (below)",
        lost="its generator vanished with it",
        run_ended="the run ended before its turn came",
    ),
    *_reasons(
        "object",
        "learner",
        empty="zero bytes",
        truncated="no whole Parquet file",
        format="another major format: a newer grpod wrote it",
        malformed="a column is missing, or does not hold what it should",
    ),
    *_reasons(
        "part",
        "learner",
        null="a value that must be there is null",
        inconsistent="its rows disagree about prompt, version or size",
        incomplete="rows are missing",
        no_tokens="a prompt or completion without tokens",
        length_mismatch="ids, log-probs and loss mask differ in length",
        logprobs_not_finite="NaN or an infinity among the log-probs",
        logprobs_positive="a log-prob above 0",
        reward_not_finite="NaN or an infinity as reward",
        temperature="a sampling temperature that is not above 0, or not finite",
        finish_reason="a completion that ended neither by stop nor by length",
        malformed="a negative id, or a loss mask that is not 0 and 1",
    ),
    *_reasons(
        "answer",
        "replica client",
        abort="the server aborted the request",
        finish_reason="a completion that ended for no known reason",
        empty="an empty body",
        json="no JSON object, or a cut one",
        error_body="an error under status 200",
        model="another model answered, the base model for example",
        prompt_ids="another prompt came back, or none",
        choices_missing="fewer choices than asked for",
        index_twice="one index twice",
        no_tokens="a choice without token ids",
        too_many_tokens="more tokens than allowed",
        logprobs_missing="no log-probs",
        logprobs_null="a null among them",
        logprobs_length="not one for each token",
        logprobs_not_finite="NaN or an infinity among them",
        logprobs_positive="one above 0",
    ),
    *_reasons(
        "version",
        "generator",
        foreign="its manifest names another run, base model or version",
        hash="a file is not what its manifest says",
    ),
    *_reasons(
        "checkpoint",
        "learner",
        foreign_run="it belongs to another run's id",
        foreign_epoch="its version was published by a learner that had lost its lease",
        torn="a file is shorter or longer than its manifest says",
        hash="a file has another sha256 than its manifest says",
    ),
)
