"""A decode step's time as a linear function of the context."""

import pytest

from evidence import lines

LENGTHS = (1024, 2048, 8192, 32768, 131072)


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ({1: 5.0, 2: 5.0, 4: 5.0}, 2.5),  # theirs pass 5 between 2 (4) and 4 (8)
        ({1: 1.0, 2: 1.0, 4: 1.0}, 1),
        ({1: 3.0, 2: 3.0, 4: 9.0}, None),
        ({1: 1.0, 2: 5.0, 4: 6.0}, 2 + 2 / 3),  # ahead, behind at 2, ahead for good
    ],
)
def test_break_even(ours, expected):
    found = lines.break_even(ours, {1: 2.0, 2: 4.0, 4: 8.0})
    assert found == (None if expected is None else pytest.approx(expected))


def test_ours_is_beside_the_better_bf16_system():
    times = {"bf16-sdpa": (8.0, 0.7), "bf16-fa3": (9.0, 0.05), "fp8attn": (9.1, 0.02)}
    rows = [
        {"case": f"step-B1-S{n}", "impl": impl, "ms": intercept + slope * n / 1000, "provenance": "1"}
        for impl, (intercept, slope) in times.items()
        for n in LENGTHS
    ]
    found = {(row["case"], row["impl"]): row for row in rows}
    ours = lines.line(found, 1)
    assert (ours.beside, ours.slope_ratio) == ("bf16-fa3", pytest.approx(0.4))
    assert ours.break_even == pytest.approx(0.1 / 0.03 * 1000)
    assert lines.batches(found) == [1] and lines.line(found, 2) is None
    apart = {key: row | {"provenance": "2"} if key[1] == "bf16-fa3" else row for key, row in found.items()}
    assert lines.line(apart, 1).beside == "bf16-sdpa"  # what was not timed together is not compared
