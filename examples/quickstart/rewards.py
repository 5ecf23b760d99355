"""A reward is a function: the group's completions and the data set's columns in, one number per completion out.

The signature is TRL's, so a reward function written for TRL's GRPO runs here as it is. It may be async, and `None` in place
of a number means "does not apply". The built-in `exact_match` would do for this task; this file shows how to bring your own.
"""


def sum_reward(completions: list[list[dict[str, str]]], answer: list[str], **columns: object) -> list[float]:
    """1 for the right sum and nothing else. A completion is a list of messages because the prompts are."""
    said = [completion[0]["content"].strip() for completion in completions]
    return [1.0 if text == right else 0.0 for text, right in zip(said, answer, strict=True)]
