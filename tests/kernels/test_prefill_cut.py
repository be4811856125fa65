"""How a problem is cut, and the estimated times against those of an H100 (microseconds, from one lab run with 16-bit queries)."""

import pytest

pytest.importorskip("triton")

from fp8attn.kernels.devices import H100
from fp8attn.kernels.prefill import cut

SMS = 132
# Sequences, query heads, queries, keys, causal: with two warpgroups, and with three.
MEASURED = {
    (1, 32, 768, 768, False): (22.9, 18.2),
    (1, 32, 1024, 1024, False): (31.2, 36.1),
    (1, 32, 2048, 2048, False): (86.4, 89.7),
    (1, 32, 3072, 3072, False): (183.4, 169.4),
    (1, 32, 4096, 4096, False): (316.4, 325.4),
    (8, 16, 2048, 2048, False): (339.0, 322.9),
    (1, 8, 4096, 4096, False): (82.1, 109.0),
    (16, 16, 1024, 1024, True): (139.9, 164.8),
    (1, 32, 2048, 2048, True): (57.1, 60.6),
    (8, 16, 2048, 2048, True): (200.3, 206.4),
    (1, 16, 3000, 3000, True): (61.8, 63.7),  # FP8 queries 60.5, 54.6
    (1, 16, 5000, 5000, True): (134.8, 132.1),
    (4, 16, 4096, 4096, True): (345.7, 338.3),
    (1, 32, 512, 8192, True): (81.2, 111.6),
    (1, 32, 2048, 8192, True): (271.0, 277.3),
    (1, 32, 1024, 131072, True): (2329.9, 3097.5),
}


def problem(sequences, heads, queries, keys, causal):
    return cut.Problem(sequences, heads, 128, sequences * queries, queries, -(-keys // 128), causal)


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_what_a_launch_takes_is_known(case):
    times = [cut.microseconds(shape, 1, SMS, problem(*case), H100) for shape in cut.SHAPES[128]]
    for expected, measured in zip(times, MEASURED[case], strict=True):
        assert expected == pytest.approx(measured, rel=0.1 if measured > 100 else 0.22)  # launches of 20 us have a fifth of overhead


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_the_cut_that_is_taken_is_at_most_4_percent_slower_than_the_fastest(case):
    shape, _ = cut.best_cut(128, SMS, problem(*case), H100)
    assert MEASURED[case][shape.warpgroups == 3] <= 1.04 * min(MEASURED[case])


def test_parts_make_waves_even():
    def parts(*case):
        shape, splits = cut.best_cut(128, SMS, problem(*case), H100)
        return shape.warpgroups, splits

    assert parts(1, 32, 192, 131072, True) == (3, 4)  # 32 items of 1,024 tiles: 128 of 256
    assert parts(1, 32, 2048, 131072, True) == (3, 3)  # 352 items are 2.7 waves, 1,056 are 8
    assert parts(1, 32, 2048, 8192, True) == (2, 1)  # not worth the combination
    assert parts(1, 8, 1024, 1024, True) == (2, 1)
    ragged = cut.Problem(2, 32, 128, 2100, 2048, 1024, True)
    assert {splits for _, splits in cut.cuts(128, SMS, ragged)} == {1}  # most of its keys may be a short sequence's
