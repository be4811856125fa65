"""On a CPU, cumulative lengths, page tables and lengths that contradict each other are refused, and
nothing is changed.
"""

import pytest
import torch

from fp8attn import KVPages, PagedKVCache, append, attention

BACKENDS = ["reference", "triton"]  # the latter in the interpreter


def bounds(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tokens(count: int, heads: int = 2) -> torch.Tensor:
    return torch.randn(count, heads, 64).bfloat16()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("cu_seqlens", "longest", "message"),
    [
        ((0, 100, 170), 100, r"start at 0, never decrease, and end within the 160 tokens given; got \[0, 100, 170\]"),
        ((0, 170, 160), 170, "never decrease"),
        ((10, 100, 160), 100, "start at 0"),
        ((-5, 100, 160), 105, "start at 0"),
        ((0, 100, 160), 99, "max_seqlen(_q)? is 99, and sequence 0 has 100 tokens: give at least that"),
    ],
)
def test_cumulative_lengths(backend, cu_seqlens, longest, message):
    pages, held = (KVPages.empty(8, 2, 64, num_seqs=2, max_pages=2) for _ in "ab")
    k = tokens(160)
    with pytest.raises(ValueError, match=message):
        append(pages, k, k, cu_seqlens=bounds(*cu_seqlens), max_seqlen=longest, backend=backend)
    assert not pages.pool.any() and pages.cache_seqlens.tolist() == [0, 0]
    append(held, k, k, cu_seqlens=bounds(0, 100, 160), max_seqlen=100)
    with pytest.raises(ValueError, match=message):
        attention(tokens(160, 4), held, cu_seqlens_q=bounds(*cu_seqlens), max_seqlen_q=longest, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_are_of_tokens_that_the_cache_has(backend):
    pages = KVPages.empty(8, 2, 64, num_seqs=2, max_pages=2)
    append(pages, tokens(180), tokens(180), cu_seqlens=bounds(0, 150, 180), max_seqlen=150)
    with pytest.raises(
        ValueError, match=r"holds 30 tokens, and without cu_seqlens_q every sequence has 90 queries.* give cu_seq"
    ):
        attention(tokens(180, 4), pages, backend=backend)
    with pytest.raises(ValueError, match="sequence 1 holds 30 tokens, and cu_seqlens_q gives it 31 queries"):
        attention(tokens(181, 4), pages, cu_seqlens_q=bounds(0, 150, 181), max_seqlen_q=150, backend=backend)
    out = attention(tokens(180, 4), pages, causal=False, backend=backend)  # queries of another sequence see all keys
    assert out.isfinite().all() and out.abs().amin() > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("table", "lengths", "message"),
    [
        ([[0, -1], [2, 3]], [130, 5], "page_table names page -1 for sequence 0, and the pool has the pages 0 to 7"),
        ([[0, 1], [8, 3]], [130, 5], "names page 8 for sequence 1"),
        ([[0, 1], [2, 3]], [-5, 5], r"cache_seqlens must not be negative; got \[-5, 5\]"),
        (
            [[0, 1], [2, 3]],
            [130, 300],
            "cache_seqlens has 300 tokens.*, and page_table has pages for 256|would have 301 tokens",
        ),
    ],
)
def test_tables_and_lengths(backend, table, lengths, message):
    pages = KVPages.empty(8, 2, 64, num_seqs=2, max_pages=2)
    pages.page_table.copy_(torch.tensor(table))
    pages.cache_seqlens.copy_(torch.tensor(lengths))
    for call in (
        lambda: attention(tokens(2, 4), pages, backend=backend),
        lambda: append(pages, tokens(2), tokens(2), backend=backend),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not pages.pool.any() and pages.cache_seqlens.tolist() == lengths


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_write_to_pages_of_their_own(backend):
    pages = KVPages.empty(3, 2, 64, num_seqs=2, max_pages=2)  # too few pages for a table of its own
    with pytest.raises(
        ValueError, match="sequences 0 and 1 would both write to page 0: page_table must name pages of its own"
    ):
        append(pages, tokens(2), tokens(2), backend=backend)
    assert not pages.pool.any()
    pages.page_table[1] = 1
    append(pages, tokens(2), tokens(2), backend=backend)
    assert pages.cache_seqlens.tolist() == [1, 1]


def test_entries_past_the_length_may_name_anything():
    pages = KVPages.empty(8, 2, 64, num_seqs=2, max_pages=2)
    pages.page_table[:, 1] = -1
    append(pages, tokens(200), tokens(200))
    assert attention(tokens(2, 4), pages).isfinite().all()


def test_a_sequence_that_is_shorter_than_its_new_tokens_is_padding():
    pages = KVPages.empty(8, 2, 64, num_seqs=2, max_pages=2)
    pages.cache_seqlens[0] = 1
    pages.page_table[1] = -1
    append(pages, tokens(2), tokens(2), advance=False)
    out = attention(tokens(2, 4), pages, cu_seqlens_q=bounds(0, 1, 2), max_seqlen_q=1)
    assert out[0].any() and not out[1].any()


def test_compiled_code_checks_on_a_cpu_too():
    pages = KVPages.empty(8, 2, 64, num_seqs=2, max_pages=2)
    append(pages, tokens(20), tokens(20))
    run = torch.compile(
        lambda q, cu: attention(q, pages, cu_seqlens_q=cu, max_seqlen_q=10), backend="aot_eager", fullgraph=True
    )
    with torch.no_grad(), pytest.raises(ValueError, match="end within the 20 tokens given"):
        run(tokens(20, 4), bounds(0, 10, 21))


def test_after_an_append_of_different_lengths_queries_are_not_divided_evenly():
    """Also where earlier tokens would let each sequence have so many queries."""
    cache = PagedKVCache(2, 64, num_seqs=2)
    cache.append(0, tokens(400), tokens(400))
    cache.append(0, tokens(180), tokens(180), lengths=[150, 30])
    q = tokens(180, 4)
    with pytest.raises(
        ValueError,
        match=r"each of the 180 tokens of the last append, whose lengths \[150, 30\] differ: give cu_seqlens_q",
    ):
        attention(q, cache.pages(0))
    out = attention(q, cache.pages(0), cu_seqlens_q=bounds(0, 150, 180), max_seqlen_q=150)
    assert torch.equal(out, cache.attention(0, q))
    assert attention(q[:2], cache.pages(0)).isfinite().all()  # other queries, one of each sequence
    cache.append(0, tokens(180), tokens(180))
    assert torch.equal(attention(q, cache.pages(0)), cache.attention(0, q))
