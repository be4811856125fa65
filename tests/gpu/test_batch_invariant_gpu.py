"""`batch_invariant` on a GPU: the same query over the same bytes in other batches, chunks and blocks, bit for bit."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import fp8attn
from fp8attn import AttentionParams, KVPages, reference
from fp8attn.backends import unsupported_reason
from fp8attn.numerics import relative_error
from tests.support.kernel_cases import cumulative, empty_cache, fill

CUDA = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("poisoned"),
]  # fmt: skip
LENGTHS = [1500, 300, 2047, 1, 128, 640, 1025, 700]  # keys; the first sequence is the one that is compared
KV_HEADS, GROUP = 2, 4
# Between: rows that see fewer than 256 keys are multiplied twice, and blocks of rows begin at 64 different positions of
# them.
PLACES = [0, 63, 127, 128, 200, 254, 255, 256, 257, 300, 383, 384, 900, 1279, 1499]
OPTIONS = {
    "plain": {}, "window": {"window": 300}, "leftpad": {"leftpad_k": [70, 0, 3, 0, 1, 0, 0, 9]},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 20.0}, "exact": {"exact": True},
}  # fmt: skip
CASES = [
    *((head_dim, keys, "plain", "hopper") for head_dim in (64, 128, 256) for keys in ("int8", "e4m3")),
    *((128, "int8", name, "hopper") for name in OPTIONS if name != "plain"),
    (64, "e4m3", "window", "hopper"), (128, "e4m3", "leftpad", "hopper"),
]  # fmt: skip


class Calls:
    """Calls of attention over parts of the same pages."""

    def __init__(self, head_dim: int, keys: str, name: str, backend: str) -> None:
        mean = 0.5 if name in ("sinks", "softcap") else 0.0
        self.pages = empty_cache(LENGTHS, KV_HEADS, head_dim, CUDA, mean, key_dtype=keys)
        k, v = torch.randn(2, sum(LENGTHS), KV_HEADS, head_dim, device=CUDA)
        fill(self.pages, k, v + 1, LENGTHS)
        self.given = dict(OPTIONS[name])
        if "sinks" in self.given:
            self.given["sinks"] = torch.randn(KV_HEADS * GROUP, device=CUDA)
        self.backend = backend
        self.q = [torch.randn(n, KV_HEADS * GROUP, head_dim, device=CUDA).bfloat16() for n in LENGTHS]

    def held(self, seqs: list[int], ends: list[int]) -> KVPages:
        """Sequences that have only their first keys."""
        return replace(
            self.pages,
            page_table=self.pages.page_table[seqs].clone(),
            cache_seqlens=torch.tensor(ends, dtype=torch.int32, device=CUDA),
        )

    def options(self, seqs: list[int], counts: list[int], ragged: bool) -> dict:
        given = self.given | {"batch_invariant": True, "return_lse": True}
        if "leftpad_k" in given:
            given["leftpad_k"] = torch.tensor([given["leftpad_k"][seq] for seq in seqs], dtype=torch.int32, device=CUDA)
        return given | ({"cu_seqlens_q": cumulative(counts, CUDA), "max_seqlen_q": max(counts)} if ragged else {})

    def rows(
        self, seqs: list[int], ends: list[int], counts: list[int], ragged: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and LSE of the first sequence's last `counts[0]` of `ends[0]` queries, beside those of other
        sequences.
        """
        q = torch.cat([self.q[seq][end - count : end] for seq, end, count in zip(seqs, ends, counts, strict=True)])
        out, lse = fp8attn.attention(
            q, self.held(seqs, ends), backend=self.backend, **self.options(seqs, counts, ragged)
        )
        assert not out.isnan().any() and not lse.isnan().any()
        return out[: counts[0]], lse[: counts[0]]


@pytest.mark.parametrize(("head_dim", "keys", "name", "backend"), CASES)
def test_a_query_has_the_same_bits(head_dim, keys, name, backend):
    if (reason := unsupported_reason(backend, CUDA)) is not None:
        pytest.skip(reason)
    calls, most = Calls(head_dim, keys, name, backend), LENGTHS[0]
    whole = calls.rows([0], [most], [most], ragged=False)
    # It is attention: the worst of these is E4M3's window of 300 keys, in which 8-bit weights average least.
    given = calls.options([0], [most], ragged=False)
    params = AttentionParams(
        None, most, True, head_dim**-0.5, **{key: value for key, value in given.items() if key != "batch_invariant"}
    )
    ref, _ = reference.attention(
        calls.q[0], calls.held([0], [most]), params, compute_dtype=torch.float64, out_dtype=torch.float64
    )
    assert relative_error(whole[0], ref) < 0.015

    def check(found: tuple[torch.Tensor, torch.Tensor], first: int, last: int, what: str) -> None:
        for x, y, of in zip(found, whole, ("output", "LSE"), strict=True):
            rows = (x != y[first:last]).flatten(1).any(1).nonzero().flatten()
            assert not len(rows), f"{what}: {of} of {len(rows)} rows differ, the first is {first + int(rows[0])}"

    check(calls.rows([0], [most], [most], ragged=True), 0, most, "with bounds")
    check(calls.rows([0, 1, 2], [most, 300, 2047], [most, 1, 700]), 0, most, "beside two")
    check(calls.rows([*range(8)], LENGTHS, [most, *(min(n, 90 + n % 7) for n in LENGTHS[1:])]), 0, most, "beside seven")
    check(calls.rows([0, 2, 6], [1000, 900, 1000], [800, 800, 800], ragged=False), 200, 1000, "dense, beside two")
    for size in (512, 128, 100):
        for first in range(0, most, size):
            last = min(first + size, most)
            check(calls.rows([0], [last], [last - first], ragged=False), first, last, f"a chunk of {size}")
    others = [*range(1, 8)]
    for place in PLACES:
        check(calls.rows([0], [place + 1], [1], ragged=False), place, place + 1, "one")
        check(calls.rows([0], [place + 1], [1], ragged=True), place, place + 1, "one, with bounds")
        check(
            calls.rows([0, *others], [place + 1, *LENGTHS[1:]], [1] * 8, ragged=False),
            place,
            place + 1,
            "one of each of eight",
        )
        check(
            calls.rows([0, *others[:2]], [place + 1, 300, 2047], [1, 3, 130]), place, place + 1, "one beside a prompt"
        )
