"""Which tokens go through the model together: pure, on lengths alone.

    group:  prompt ppppp, completions aa bbbb c          row        ppppp aa bbbb c       (the prompt is computed once)
                                                         micro-batch  rows of similar length, padded to the longest

No row attends across its completions (`batch.py` has the mask); nothing is ever cut or left out: what is longer than the
token budget has a row, or a micro-batch, of its own. The same input always gives the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence


def share_prompt(prompt: int, completions: Sequence[int], *, token_budget: int, hidden_size: int) -> list[list[int]]:
    """Rows of one group, as indices of its completions, longest first.

    A row of k completions saves (k-1)·prompt tokens of every matrix product, about 24·hidden² a token and layer, and pays
    for attention between completions that the mask then throws away: k(k-1)·n² - (k-1)·prompt² pairs at 4·hidden each.
    It is worth it while k·n² <= prompt·(prompt + 6·hidden), n being the longest of them.
    """
    rows: list[list[int]] = []
    length = longest = 0
    for index in sorted(range(len(completions)), key=lambda i: -completions[i]):
        n = completions[index]
        fits = bool(rows) and length + n <= token_budget
        if fits and (len(rows[-1]) + 1) * longest**2 <= prompt * (prompt + 6 * hidden_size):
            rows[-1].append(index)
            length += n
        else:
            rows.append([index])
            length, longest = prompt + n, n
    return rows


def pack(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Micro-batches of rows, longest first, each with rows · longest <= token_budget where more than one row is in it.

    Taking from the longest down makes the fewest micro-batches that this padding allows.
    """
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * longest <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches
