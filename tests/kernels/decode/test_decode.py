"""The Hopper decode kernel without a GPU: fragment maps, the compiled code, and its PTX run on the CPU."""

import pytest
import torch

from fp8attn.formats.page_layout import V_ORDER
from tests.support import compiling

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

pytestmark = pytest.mark.slow

# What is compiled in CI, and the most instructions in its loop over a page: what Triton 3.6 and 3.9 give, and a little.
LOOPS = {
    "D64 rows4 int8": 240, "D64 rows4 e4m3": 260, "D96 rows16 e4m3": 540, "D128 rows4 int8": 325,
    "D128 rows4 e4m3": 375,
    "D128 rows16 int8": 505, "D128 rows4 plain": 375, "D256 rows4 int8": 480, "D128 tile64": 240,
}  # fmt: skip
# Besides the rounding of weights to FP16 and of the output, queries are rounded: of an INT8 row by 2^-17 of the largest
# element at most, rotated ones by 2^-12 of themselves, and others not at all. The scores of these cases spread by up to
# 5.
ERRORS = {
    "int8": (2e-4, 5e-4),
    "e4m3 rotated": (4e-4, 2e-3),
    "e4m3": (1.5e-4, 1e-5),
}  # of the output, relative; of the LSE
EMULATED = (
    *("ragged", "ragged e4m3", "split", "D64 rows16", "D80", "broken", "everything", "idle", "parts"),
    *("late consumer", "late producer", "tiles of 64 keys", "tiles of 64 keys, split"),
)
SAMPLE = ("everything", "parts")


@pytest.mark.triton36
@pytest.mark.parametrize("case", LOOPS)
def test_compiles_without_spills_in_the_loop(case):
    row = compiling.call("tests.kernels.decode.run_decode", "compile_case", case)
    assert row["warnings"] == "" and row["loop_spills"] == 0, row
    assert row["spill_bytes"] <= 40, row  # addresses that each head reloads once
    assert row["loop"] <= LOOPS[case], row
    assert row["narrow"] == [], "queries of 2^31 elements and more have offsets of 64 bits"
    assert row["atomics"] == ["atom.global.gpu.acq_rel.add.u32"], (
        "the last range may combine parts that others have not written yet"
    )
    assert row["fenced"], "TMA may overwrite a stage while loads from it are under way"
    assert row["shared_bytes"] <= (232448 if "D256" in case else 232448 // 2 - 1024), row


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.triton36] * (case in SAMPLE)) for case in EMULATED]
)
def test_agrees_with_the_reference(case):
    """Ragged and empty sequences, NaN in what must not be read, shared and whole heads, more CTAs than work, every
    option at once. NaN in a query and in the scale of a page, which reaches the rows that see it and no other. And a
    warp that comes late to everything, as others' instructions between its own (a sanitizer's) can make it."""
    row = compiling.call("tests.kernels.decode.run_decode", "emulate_case", case)
    error, lse_error = ERRORS[row["keys"]]
    assert row["same_nan"] and row["same_inf"] and row["lse_err"] < lse_error, row
    assert row["counters"] == 0, "the counters must be left as they were found"
    assert (row["rel_err"] ** 2 - row["rounding"] ** 2) ** 0.5 <= error, row


def lanes_of_a(row: int, column: int) -> tuple[int, int, int]:
    """PTX ISA, mma.m16n8k16: which (lane, register, half) holds A[row, column]."""
    return row % 8 * 4 + column % 8 // 2, row // 8 + 2 * (column // 8), column % 2


def lanes_of_b(row: int, column: int) -> tuple[int, int, int]:
    return column * 4 + row % 8 // 2, row // 8, row % 2


def lanes_of_c(row: int, column: int) -> tuple[int, int]:
    return row % 8 * 4 + column // 2, row // 8 * 2 + column % 2


def test_four_bytes_of_v_are_one_threads_fragment():
    """Bytes [4t, 4t + 4) of channel c in 16 tokens: the four of V's 16x16 A operand that lane 4c + t holds of row c, in
    register order.
    """
    for channel in range(16):
        for lane in range(4):
            tokens = V_ORDER[4 * lane : 4 * lane + 4]
            places = [lanes_of_a(channel, token) for token in tokens]
            assert {place[0] for place in places} == {channel % 8 * 4 + lane}
            assert [place[1:] for place in places] == [(channel // 8 + 2 * (i // 2), i % 2) for i in range(4)]


def test_transposed_scores_are_the_other_operand():
    """S^T's accumulators, packed in pairs and transposed 8x8 by movmatrix, are P^T's B operand in V's order, register
    by register.
    """
    scores = torch.arange(16 * 8).view(16, 8)  # [token, row]
    for half in range(2):  # registers 0, 1 hold tokens 0-7 and registers 2, 3 tokens 8-15: one 8x8 matrix each
        matrix = torch.empty(8, 8, dtype=torch.long)
        for token in range(8):
            for row in range(8):
                lane, register = lanes_of_c(8 * half + token, row)
                assert register // 2 == half
                matrix[lane // 4, lane % 4 * 2 + register % 2] = scores[
                    8 * half + token, row
                ]  # movmatrix: lane 4i + j has (i, 2j), (i, 2j + 1)
        matrix = matrix.T
        for token in range(8):
            for row in range(8):
                lane, register, pair = lanes_of_b(8 * half + token, row)
                assert register == half
                assert matrix[lane // 4, lane % 4 * 2 + pair] == scores[8 * half + token, row]
    # The B registers of lane 4r + t are tokens V_ORDER[4t : 4t + 4] of row r: the same that the A operand's four bytes
    # are.
    for lane in range(4):
        assert [lanes_of_b(token, 0) for token in V_ORDER[4 * lane : 4 * lane + 4]] == [
            (lane, i // 2, i % 2) for i in range(4)
        ]
