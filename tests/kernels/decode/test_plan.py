"""The plan of a decode launch, and the names of the numbers that the kernel takes."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from fp8attn import KVPages
from fp8attn.formats.spec import PageSpec
from fp8attn.kernels.decode import kernel, plan
from fp8attn.kernels.decode.plan import DecodeNumbers, DecodeProblem, count_workers, make_decode_plan


def problem(**changes) -> DecodeProblem:
    """A query of each of two sequences, with four query heads for each of two KV heads."""
    return DecodeProblem(
        pool=KVPages.empty(8, 2, 128, num_seqs=2, max_pages=4).pool.shape, spec=PageSpec.of(128).name, group=4,
        num_seqs=2, max_q=1, causal=False, ragged=False, window=False, softcap=False, sinks=False, leftpad=False,
        rotate=True,
    )._replace(**changes)  # fmt: skip


@pytest.fixture
def plan_of(monkeypatch):
    """The plan of a problem on a GPU of 132 multiprocessors."""
    monkeypatch.setattr(plan, "num_sms", lambda device: 132)
    make_decode_plan.cache_clear()
    yield lambda **changes: make_decode_plan(torch.device("cpu"), problem(**changes))
    make_decode_plan.cache_clear()


def test_the_kernel_takes_the_numbers_in_their_order():
    """The host passes the fields of `DecodeNumbers` by position. So the kernel's parameters between the counters and
    the scale have their names.
    """
    parameters = kernel.decode_kernel.params
    names = [parameter.name for parameter in parameters]
    assert names[names.index("state_ptr") + 1 : names.index("scale")] == [*DecodeNumbers._fields]
    assert {parameter.name for parameter in parameters if parameter.do_not_specialize} == {
        "table_stride", "plane", *DecodeNumbers._fields
    }  # fmt: skip


def test_numbers_follow_from_the_problem(plan_of):
    """Four rows have a row tile of 8, 32 rows have two of 16. Each range of a row tile has two parts."""
    few, many = plan_of(), plan_of(max_q=8)
    assert few.grid == (few.workers,) == (few.counters.count,) and few.plane == 2 * 8 * few.workers
    assert many.grid == (2 * many.workers,) == (many.counters.count,) and many.plane == 2 * 16 * 2 * many.workers
    assert few.scratch == few.plane * (128 + 3)
    assert few.constants["OPTIONS"].one_row_tile and not many.constants["OPTIONS"].one_row_tile
    assert (few.constants["OPTIONS"].rows, many.constants["OPTIONS"].rows) == (8, 16)
    assert few.constants["maxnreg"] == 65536 // (2 * 8 * 32)


def test_a_tile_may_be_half_a_page(plan_of, monkeypatch):
    """The copies and the kernel are of 64 tokens, and what is counted in pages has twice as many tiles."""
    whole = plan_of()
    monkeypatch.setattr(plan, "TILE", 64)
    make_decode_plan.cache_clear()
    half = plan_of()
    assert (whole.k.block, half.k.block) == ((1, 128, 128), (1, 64, 128))
    assert (whole.v.block, half.v.block) == ((1, 1, 8, 8, 256), (1, 1, 4, 8, 256))
    whole, half = whole.constants["OPTIONS"], half.constants["OPTIONS"]
    assert (whole.tile, whole.stages, whole.whole_tiles, whole.head_tiles) == (128, 2, 4, 2)
    assert (half.tile, half.stages, half.whole_tiles, half.head_tiles) == (64, 4, 8, 4)


def test_there_is_work_for_a_slice_of_a_gpu():
    """A seventh of an H100 (MIG) has 16 multiprocessors or fewer, and at head_dim 256 many query rows are several
    tiles.
    """
    for sms in (1, 7, 14, 132):
        for row_tiles in (1, 8):
            assert count_workers(sms, ctas=1, row_tiles=row_tiles, heads=3) >= 1


def test_ranges_are_one_for_each_multiprocessor_or_share_no_head():
    assert count_workers(132, ctas=2, row_tiles=1, heads=8) == 128  # 16 ranges a head
    assert count_workers(132, ctas=2, row_tiles=1, heads=512) == 256  # two heads a range, on both CTAs
    assert count_workers(132, ctas=1, row_tiles=8, heads=512) == 16
