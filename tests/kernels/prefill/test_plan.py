"""The plan of a prefill launch, and the names of the numbers that the kernel takes from it."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from fp8attn import KVPages
from fp8attn.formats.spec import PageSpec
from fp8attn.kernels.prefill import cut, kernel, plan
from fp8attn.kernels.prefill.plan import PrefillNumbers, PrefillProblem, make_prefill_plan, tma_takes


def problem(**changes) -> PrefillProblem:
    """64 queries of each of two sequences of up to four pages."""
    pages = KVPages.empty(8, 2, 128, num_seqs=2, max_pages=4)
    return PrefillProblem(
        shape=(2, 64, 8, 128), strides=(65536, 1024, 128, 1), out_strides=(65536, 1024, 128, 1), pool=pages.pool.shape,
        spec=PageSpec.of(128).name, num_seqs=2, columns=4, table_stride=4, ragged=False, max_seqlen_q=64, causal=True,
        window=0, softcap=False,
        leftpad=False, rotate=True, exact=False, batch_invariant=False, q8=False, lse=False,
    )._replace(**changes)  # fmt: skip


def test_the_kernel_takes_the_numbers_of_the_plan_in_their_order():
    """The host passes the fields of `PrefillNumbers` by position. So the kernel's parameters after the pointers have
    their names.
    """
    names = [parameter.name for parameter in kernel.prefill_kernel.params]
    assert names[names.index("counter_ptr") + 1 :] == [*PrefillNumbers._fields, "scale", "cap", "new_keys", "OPTIONS"]
    assert (*PrefillNumbers._fields, "scale", "cap", "new_keys") == kernel.NUMBERS
    assert [parameter.name for parameter in kernel.prefill_kernel.params if parameter.do_not_specialize] == [
        *kernel.NUMBERS
    ]


def test_numbers_follow_from_the_problem():
    numbers = make_prefill_plan(torch.device("cpu"), problem()).numbers
    assert (numbers.out_stride_b, numbers.out_stride_t, numbers.out_stride_h) == (65536 // 8, 1024 // 8, 128 // 8)
    assert (numbers.num_tokens, numbers.max_q, numbers.num_seqs, numbers.num_q_heads, numbers.num_kv_heads) == (
        64,
        64,
        2,
        8,
        2,
    )
    assert (numbers.table_width, numbers.causal, numbers.window, numbers.parts) == (4, 1, plan.NO_WINDOW, 1)
    assert numbers.plane == 2 * 64 * 8
    assert make_prefill_plan(torch.device("cpu"), problem(window=300, causal=False)).numbers[9:11] == (0, 300)


def test_plans_of_other_batches_have_the_views_of_a_pool():
    """A descriptor of K or V, which costs 20 us, is found by its view."""
    few, many = (
        make_prefill_plan(torch.device("cpu"), problem(shape=(2, n, 8, 128), max_seqlen_q=n)) for n in (64, 128)
    )
    assert few is not many and few.k is many.k and few.v is many.v


def test_strides_that_tma_cannot_fetch_are_reported():
    assert make_prefill_plan(torch.device("cpu"), problem()).fetched
    assert not make_prefill_plan(torch.device("cpu"), problem(strides=(65540, 1028, 128, 1))).fetched
    assert tma_takes((2, 64, 8, 128), (65544, 1032, 136, 1), 2) and not tma_takes(
        (2, 64, 8, 128), (65544, 1032, 136, 1), 1
    )
    assert tma_takes((1, 64, 8, 128), (3, 1024, 128, 1), 2)  # of one sequence, the stride does not matter


def test_a_tile_may_be_half_a_page(monkeypatch):
    """The copies and the kernel are of 64 keys, and a part of the keys, which is counted in pages, has twice as many
    tiles.
    """

    def plan_of(tile: int):
        monkeypatch.setattr(plan, "best_cut", lambda *_: (replace(cut.SHAPES[128][0], tile=tile), 2))
        make_prefill_plan.cache_clear()
        return make_prefill_plan(torch.device("cpu"), problem())

    whole, half = plan_of(128), plan_of(64)
    make_prefill_plan.cache_clear()
    assert (whole.k.block, half.k.block) == ((1, 128, 128), (1, 64, 128))
    assert (whole.v.block, half.v.block) == ((1, 1, 8, 8, 256), (1, 1, 4, 8, 256))
    assert half.k.shape == whole.k.shape and half.v.shape == whole.v.shape
    assert (whole.numbers.min_tiles, half.numbers.min_tiles) == (cut.PART, 2 * cut.PART)
    assert (whole.constants["OPTIONS"].tile.value, half.constants["OPTIONS"].tile.value) == (128, 64)
