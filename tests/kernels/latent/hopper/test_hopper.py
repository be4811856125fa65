"""The Hopper kernels of latent attention without a GPU: the compiled code, and their PTX run on the CPU."""

import pytest
import torch

from fp8attn import AttentionParams, KVPages
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.spec import PageSpec
from tests.support import compiling

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

pytestmark = pytest.mark.slow

# Of the warps that accumulate and of those that compute weights: the instructions of the loop over tiles and the spills
# in it. What a Triton gives, and a little. In prompts, addresses spill. The prototype had 172 and 0, 449 and 13 (two
# digits), 345 and 20, 577 and 0 (one digit) under Triton 3.9.
LOOPS = {
    "3.9": {
        "two digits": ((168, 0), (420, 0)), "two digits, drafts": ((168, 0), (500, 0)),
        "two digits, ragged": ((168, 0), (500, 0)), "two digits, rank 256, rope 32": ((175, 0), (374, 0)),
        "two digits, rope 128": ((194, 4), (444, 0)), "two digits, RoPE in codes": ((168, 0), (420, 0)),
        "two digits, no rope": ((168, 0), (392, 0)),
        "one digit": ((340, 0), (535, 0)), "one digit, drafts": ((340, 0), (656, 2)),
        "one digit, rank 256, rope 32": ((335, 0), (483, 0)),
        "prompt": ((340, 0), (660, 6)), "prompt, padding": ((340, 0), (740, 12)),
    },
    "3.6": {
        "two digits": ((172, 0), (402, 0)), "two digits, drafts": ((172, 0), (480, 0)),
        "one digit": ((340, 2), (510, 0)), "one digit, drafts": ((340, 2), (634, 0)),
        "prompt": ((338, 0), (634, 2)), "prompt, padding": ((338, 0), (713, 12)),
    },
}  # fmt: skip
CASES = LOOPS.get(triton.__version__.rpartition(".")[0], {})
# Of the output against float64 on the same bytes, besides its rounding: with the queries as they were rounded, and with
# them as they were. The LSE's. With one digit the latter two have the error of queries of one digit.
ERRORS = {
    "one digit": (0.015, 0.02, 0.08),
    "one digit, mean 1": (0.0075, 0.01, 0.08),
    "one digit, drafts": (0.0075, 0.01, 0.08),
    "one digit, rank 256": (0.0045, 0.006, 0.05),
    "one digit, broken": (0.015, 0.02, 0.08),
    "one digit, zeros": (0.015, 0.02, 0.08),
    "one digit, many": (0.015, 0.02, 0.08),
    "one digit, pieces": (0.015, 0.02, 0.08),
    "one digit, RoPE in codes": (0.015, 0.02, 0.08),
    "one digit, padding": (0.015, 0.02, 0.08),
    "prompt": (0.015, 0.02, 0.08),
    "prompt, ragged": (0.015, 0.02, 0.08),
    "prompt, padding": (0.015, 0.02, 0.08),
    "prompt, not causal": (0.015, 0.02, 0.08),
    "one digit, many rows in ranges": (0.015, 0.02, 0.08),
    "units that grow": (0.01, 0.01, 0.002),
}
TWO_DIGITS = (0.0015, 0.0015, 0.0005)
EMULATED = (
    "ragged", "split", "drafts", "drafts of several lengths", "rank 256", "rope 128", "no rope", "broken",
    "RoPE in codes", "RoPE in codes, drafts", "one digit, RoPE in codes", "padding", "padding, drafts",
    "one digit, padding",
    "units that grow", "one digit", "one digit, mean 1", "one digit, drafts", "one digit, rank 256",
    "prompt", "prompt, ragged", "prompt, padding", "prompt, not causal", "one digit, many rows in ranges",
    "one digit, broken", "zeros", "one digit, zeros", "many", "one digit, many",
    "pieces", "one digit, pieces",
)  # fmt: skip
# Also with Triton 3.6. Its rounding of two digits stores single bytes of a word from two warps, and the emulator knows
# only the order of words.
SAMPLE = ("one digit, mean 1",)


@pytest.mark.triton36
@pytest.mark.skipif(not CASES, reason=f"no bounds for Triton {triton.__version__}")
@pytest.mark.parametrize("case", CASES)
def test_compiles_as_it_was_tuned(case):
    row = compiling.call("tests.kernels.latent.hopper.run_hopper", "compile_case", case)
    assert row["warnings"] == "", "ptxas serializes products"
    for loop, (instructions, spills) in zip((row["accumulate"], row["softmax"]), CASES[case], strict=True):
        assert loop["loop"] <= instructions and loop["spills"] <= spills, row
    assert row["accumulate"]["barriers"] == 0, "warpgroups must not meet in a tile"
    assert row["overwritten"] == "", "a register is written while a product reads it"
    assert row["shared_bytes"] <= 232448 and 0 < row["end"] <= row["addressed"], row
    assert row["unsigned"] == (0 if "two digits" in case else 8), row
    assert row["spill_bytes"][::2] == [0, 0], row


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.triton36] * (case in SAMPLE)) for case in EMULATED]
)
def test_agrees_with_float64(case):
    """Ragged and empty sequences, NaN in what must not be read, sequences that ranges share, more CTAs than work,
    drafts (causal among themselves), padded heads, a NaN in a query, and warps that come late to everything."""
    row = compiling.call("tests.kernels.latent.hopper.run_hopper", "emulate_case", case)
    kernel_error, error, lse_error = ERRORS.get(case, TWO_DIGITS)
    assert row["same_nan"] and row["same_inf"], row
    assert row.get("kernel_err", 0.0) <= kernel_error and row["rel_err"] <= error and row["lse_err"] <= lse_error, row


def test_a_unit_that_grows_is_no_bias():
    """With the bits of high digits cut off, the first channels of blocks had 5 times the error of the others."""
    row = compiling.call("tests.kernels.latent.hopper.run_hopper", "emulate_case", "two tiles")
    assert row["first_channels"] <= 1.5 and row["rel_err"] <= 0.001, row


@pytest.mark.parametrize("case", ["split", "one digit, mean 1"])
def test_two_runs_have_equal_bits(case):
    first, second = (
        compiling.call("tests.kernels.latent.hopper.run_hopper", "emulate_case", case, seed) for seed in (1, 2)
    )
    assert first == second


def test_queries_of_very_different_lengths_are_not_taken():
    """Memory is allocated as if all sequences had the most rows."""
    from fp8attn.kernels.latent import hopper

    def takes(seqs: int, queries: int, heads: int, tokens: int) -> bool:
        table, lengths = torch.zeros(seqs, 1, dtype=torch.int32), torch.ones(seqs, dtype=torch.int32)
        spec = PageSpec.latent(512, 64)
        pages = KVPages(
            torch.zeros(1, 1, 128 * 644, dtype=torch.uint8), table, lengths, KVFormat.of(spec, "int8", True)
        )
        q = torch.zeros(1, heads, spec.k_dim).expand(tokens, -1, -1)
        return hopper.takes(q, pages, AttentionParams(None, queries, True, 0.1))

    assert takes(1, 100_000, 128, 100_000) and takes(4, 1000, 128, 1003) and not takes(5, 1000, 128, 1004)
    assert takes(8, 64, 128, 71) and not takes(9, 64, 128, 72)
    assert takes(1000, 8, 128, 1007) and not takes(1000, 9, 128, 1008)
