"""Whether the greedy answers of two engines are the same but for near-ties.

How many answers are equal says little: another order of sums flips near-ties, in BF16, too, and all tokens after a flip are others. The
logits are BF16, so two tokens lead by a multiple of 1/16 nats, and often by none. Log-probabilities tell a flip from a defect.
"""

import math


def differences(found, expected):
    """How far two engines are from each other where they have read the same tokens: in an answer up to its first token that differs.

    Args:
        found, expected: what `engines.answers` returns.
    Returns:
        For each of these tokens, the difference of the expected token's log-probability in nats; and for each answer that differs, by how
        many nats the first two tokens that differ have moved against each other: the lead of each over the other in its own engine, added
        up. A token that is not among the likeliest is infinitely far.
    """
    tokens, flips = [], []
    for own, others, own_steps, other_steps in zip(
        found["answers"], expected["answers"], found["logprobs"], expected["logprobs"], strict=True
    ):
        for token, other, step, other_step in zip(own, others, own_steps, other_steps, strict=True):
            tokens.append(abs(_logprob(step, other) - _logprob(other_step, other)))
            if token != other:
                lead, other_lead = _logprob(step, token) - _logprob(step, other), _logprob(other_step, other) - _logprob(other_step, token)
                flips.append(lead + other_lead)
                break
    return tokens, flips


def _logprob(step, token):
    return step.get(str(token), -math.inf)  # JSON's keys are strings
