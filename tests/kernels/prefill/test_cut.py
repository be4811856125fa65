"""How a problem is cut, and the estimated times against measured ones (microseconds, from lab runs with 16-bit
queries).
"""

import pytest

pytest.importorskip("triton")

from fp8attn.kernels.devices import H100, H200
from fp8attn.kernels.prefill import cut

SMS = 132
# Sequences, query heads, queries, keys, causal: with two warpgroups, and with three.
ON_H100 = {  # E4M3 keys
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

# On an H200 with Triton 3.6; and with Triton 3.9, where that is said. Rotated INT8 keys, E4M3 keys, FP8 queries.
ON_H200 = {
    (1, 32, 1024, 1024, True): (22.5, 24.9),
    (1, 32, 2048, 2048, True): (53.6, 59.1),
    (1, 32, 2048, 2048, False): (87.8, 96.0),
    (1, 32, 4096, 4096, True): (179.6, 189.1),
    (1, 32, 4096, 4096, False): (328.7, 355.8),
    (1, 32, 8192, 8192, True): (656.0, 650.2),
    (1, 32, 16384, 16384, True): (2481.8, 2399.2),
    (1, 32, 2048, 16384, True): (594.2, 626.7),
    (16, 16, 1024, 1024, True): (126.9, 155.1),
    (8, 16, 2048, 2048, True): (203.4, 219.2),
    (4, 16, 4096, 4096, True): (350.8, 364.1),
    (2, 16, 8192, 8192, True): (655.1, 652.7),
    (4, 16, 4096, 4096, False): (665.2, 662.6),
    (1, 32, 6144, 6144, True): (383.6, 386.0),
    (1, 16, 16384, 16384, True): (1256.8, 1209.2),
    (1, 32, 3072, 3072, False): (195.2, 191.9),
}
WITH_TRITON_39 = {
    (1, 32, 1024, 1024, True): (24.5, 27.4),
    (4, 16, 4096, 4096, True): (354.4, 356.2),
    (2, 16, 8192, 8192, True): (639.6, 617.8),
    (1, 16, 16384, 16384, True): (1230.0, 1159.4),
    (1, 16, 16384, 16384, False): (2497.1, 2387.6),
    (1, 32, 4096, 4096, True): (181.6, 181.7),
    (4, 16, 4096, 4096, False): (697.8, 662.0),
    (1, 32, 6144, 6144, True): (383.9, 373.2),
    (1, 32, 3072, 3072, False): (205.0, 189.0),
}
WITH_E4M3_KEYS_AND_TRITON_39 = {
    (1, 32, 4096, 4096, True): (170.5, 188.9),
    (4, 16, 4096, 4096, True): (340.0, 364.1),
    (4, 16, 4096, 4096, False): (656.7, 660.4),
    (1, 32, 6144, 6144, True): (358.5, 368.4),
    (2, 16, 8192, 8192, True): (618.8, 622.3),
    (1, 32, 3072, 3072, False): (185.9, 187.1),
}
WITH_E4M3_KEYS = {
    (1, 32, 1024, 1024, True): (23.4, 27.5),
    (1, 32, 2048, 2048, True): (54.1, 60.1),
    (1, 32, 2048, 2048, False): (87.6, 91.1),
    (1, 32, 4096, 4096, True): (180.3, 189.1),
    (1, 32, 4096, 4096, False): (329.5, 339.4),
    (1, 32, 8192, 8192, True): (656.7, 624.6),
    (1, 32, 16384, 16384, True): (2490.6, 2280.8),
    (1, 32, 2048, 16384, True): (591.3, 606.3),
    (16, 16, 1024, 1024, True): (136.1, 175.1),
    (8, 16, 2048, 2048, True): (205.9, 220.6),
    (4, 16, 4096, 4096, True): (351.0, 361.0),
    (2, 16, 8192, 8192, True): (654.4, 622.4),
    (4, 16, 4096, 4096, False): (669.0, 626.6),
    (1, 32, 6144, 6144, True): (380.4, 374.6),
    (1, 16, 16384, 16384, True): (1254.4, 1154.3),
    (1, 32, 3072, 3072, False): (195.8, 179.5),
}
WITH_FP8_QUERIES = {
    (1, 32, 1024, 1024, True): (19.3, 19.7),
    (1, 32, 2048, 2048, True): (48.8, 48.1),
    (1, 32, 2048, 2048, False): (82.6, 84.0),
    (1, 32, 4096, 4096, True): (171.4, 163.1),
    (1, 32, 8192, 8192, True): (638.4, 581.7),
    (1, 32, 16384, 16384, True): (2448.5, 2217.5),
    (16, 16, 1024, 1024, True): (110.6, 119.3),
    (8, 16, 2048, 2048, True): (186.4, 181.4),
    (4, 16, 4096, 4096, True): (333.3, 313.5),
    (2, 16, 8192, 8192, True): (647.1, 574.1),
    (4, 16, 4096, 4096, False): (649.2, 599.5),
    (1, 32, 6144, 6144, True): (365.0, 344.7),
    (1, 32, 3072, 3072, False): (188.0, 169.3),
}
# Few queries, on an H100 with rotated INT8 keys and Triton 3.9, each shape with the parts that the model gives it.
FEW_QUERIES = {
    (4, 32, 64, 16384, True): (166.1, 129.2),
    (1, 32, 64, 131072, True): (357.9, 259.8),
    (16, 32, 32, 8192, True): (326.0, 262.9),
    (64, 32, 17, 2048, True): (343.8, 305.3),
    (8, 32, 64, 1024, True): (28.6, 27.3),
    (2, 32, 40, 4096, True): (32.5, 30.8),
    (4, 32, 128, 16384, True): (172.2, 178.9),
}
MEASURED = {
    "H100": (H100, False, ON_H100),
    "H200": (H200, False, ON_H200),
    "H200, Triton 3.9": (H200, False, WITH_TRITON_39),
    "H200, E4M3 keys, Triton 3.9": (H200, False, WITH_E4M3_KEYS_AND_TRITON_39),
    "H200, E4M3 keys": (H200, False, WITH_E4M3_KEYS),
    "H200, FP8 queries": (H200, True, WITH_FP8_QUERIES),
}
CASES = [
    pytest.param(chip, q8, case, times, id=f"{name} {case}")
    for name, (chip, q8, measured) in MEASURED.items()
    for case, times in measured.items()
]
# Queries of the sequences of a ragged batch, keys of the longest: with two warpgroups, and with three, on an H200.
RAGGED = {
    ((1024,), 1024): (31.1, 38.5),
    ((2048,), 2048): (62.0, 65.9),
    ((8192,), 8192): (658.6, 624.0),
    ((512,), 32768): (303.3, 408.6),
    ((1024, 700, 1500, 333, 2048, 512, 900, 1200), 2048): (196.6, 228.0),
    ((100, 600, 250, 400, 330, 120, 512, 90, 480, 260, 310, 550, 200, 150, 70, 440), 600): (120.9, 153.5),
    ((2048, 700, 1500, 333, 2048), 16384): (687.2, 651.4),
    ((9000, 130, 4096, 700, 2500, 64, 12000, 1500, 333, 6000), 12000): (2841.3, 2702.4),
    ((2048, *[1] * 63), 16384): (1457.2, 1628.2),
}


def problem(sequences, heads, queries, keys, causal, q8=False):
    return cut.Problem(sequences, heads, 128, sequences * queries, queries, -(-keys // 128), causal, False, q8=q8)


@pytest.mark.parametrize(("chip", "q8", "case", "measured"), CASES)
def test_what_a_launch_takes_is_known(chip, q8, case, measured):
    for shape, time in zip(cut.SHAPES[128], measured, strict=True):
        # Launches of 20 us have a fifth of overhead; on an H200, those of 30 us also rows of few keys, which are
        # multiplied twice.
        near = 0.1 if time > 100 else 0.22 if chip is H100 or time > 60 else 0.34
        assert cut.microseconds(shape, 1, SMS, problem(*case, q8), chip) == pytest.approx(time, rel=near)


@pytest.mark.parametrize(("chip", "q8", "case", "measured"), CASES)
def test_the_cut_that_is_taken_is_at_most_4_percent_slower_than_the_fastest(chip, q8, case, measured):
    shape, _ = cut.best_cut(128, SMS, problem(*case, q8), chip)
    assert measured[shape.warpgroups == 3] <= 1.04 * min(measured)


@pytest.mark.parametrize("chip", [H100, H200], ids=lambda chip: chip.name)
@pytest.mark.parametrize(("case", "measured"), FEW_QUERIES.items(), ids=str)
def test_partitions_without_rows_are_not_counted(case, measured, chip):
    """With up to 64 queries, one of three partitions multiplies."""
    shape, _ = cut.best_cut(128, SMS, problem(*case), chip)
    assert measured[shape.warpgroups == 3] <= 1.05 * min(measured)
    assert shape.warpgroups == 3 or case[2] > 64 or case[3] == 1024  # of 8 tiles, what items take counts as much


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("queries", "keys"), RAGGED, ids=str)
def test_the_faster_shape_is_taken_for_a_ragged_batch(queries, keys, wide):
    """Also if the table of pages is as wide as an engine's, where the model sees many more keys."""
    tiles = 1024 if wide else -(-keys // 128)
    shape, splits = cut.best_cut(
        128, SMS, cut.Problem(len(queries), 32, 128, sum(queries), max(queries), tiles, True, True), H200
    )
    measured = RAGGED[queries, keys]
    assert measured[shape.warpgroups == 3] <= (1.06 if wide else 1.0) * min(measured) and splits == 1


@pytest.mark.parametrize(
    ("case", "last"),
    [
        ((1, 16, 16384, 16384, False), 640),  # 1,376 items are 10.4 waves: 1,312, and 64 in two parts
        ((1, 32, 4096, 4096, False), 0),  # 7.8 waves of two warpgroups
        ((4, 16, 4096, 4096, False), 0),  # 10.7 waves
        ((1, 40, 75600, 75600, False), 0),  # 119.4
        ((1, 8, 1024, 131072, False), 0),  # less than a wave, which parts fill
    ],
)
def test_a_second_launch_computes_what_would_leave_the_last_wave_idle(case, last):
    assert cut.last_wave(128, SMS, problem(*case), H200) == last


def test_parts_make_waves_even():
    def parts(*case):
        shape, splits = cut.best_cut(128, SMS, problem(*case), H100)
        return shape.warpgroups, splits

    assert parts(1, 32, 192, 131072, True) == (3, 4)  # 32 items of 1,024 tiles: 128 of 256
    assert parts(1, 32, 2048, 131072, True) == (3, 3)  # 352 items are 2.7 waves, 1,056 are 8
    assert parts(1, 32, 2048, 8192, True) == (2, 1)  # not worth the combination
    assert parts(1, 8, 1024, 1024, True) == (2, 1)
    ragged = cut.Problem(2, 32, 128, 2100, 2048, 1024, True, True)
    assert {splits for _, splits in cut.cuts(128, SMS, ragged)} == {1}  # most of its keys may be a short sequence's
