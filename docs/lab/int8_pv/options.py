"""Options of the experiment: the product's, and which scales K and V have."""

from __future__ import annotations

from dataclasses import dataclass

from fp8attn.kernels.prefill.plan import PrefillOptions

# K: one scale a page; one for 32 tokens; one a token, added to an accumulator that is set before ("fma") or by a product ("bias").
KEYS = ("page", "group", "fma", "bias")
# V: one scale a page; one a token.
VALUES = ("page", "token")


@dataclass(frozen=True)
class LabOptions(PrefillOptions):
    k_form: str
    v_form: str
    synchronous: bool  # sums of integers by `mma.sync`
    loaded: bool  # K's second number of a token is in memory, too
    converted: int  # codes that are brought from tokens' scales to their page's in shared memory (`convert`): 0, none; 1, K's; 2, all
