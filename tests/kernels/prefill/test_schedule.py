"""The order in which Hopper prefill takes the items of a ragged batch, without a GPU:
its search's PTX, run on the CPU.
"""

import pytest

from tests.support import compiling

BLOCK = 192


@pytest.fixture(scope="module")
def batches() -> list[dict]:
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    return compiling.call("tests.kernels.prefill.run_prefill_order", "batches")


@pytest.mark.triton36
def test_every_item_is_claimed_once_and_those_of_many_keys_first(batches):
    """Batches with sequences without queries or keys, rows behind the last one, a window, and more sequences than a
    warp has lanes.
    """
    assert max(len(batch["queries"]) for batch in batches) > 64
    for batch in batches:
        queries, count = [*batch["queries"], batch["rest"]], len(batch["queries"])
        keys = [min(n, batch["window"] + BLOCK) for n in [*batch["keys"], 0]]
        items = [batch["heads"] * -(-n // BLOCK) for n in queries]
        order = sorted((seq for seq in range(count + 1) if items[seq]), key=lambda seq: -keys[seq].bit_length())
        want = [(seq, item) for seq in order for item in range(items[seq])]
        assert len(set(want)) == sum(items)
        claims = batch["claims"]
        assert [(seq, claim - base) for claim, (seq, base, *_) in enumerate(claims[: len(want)])] == want
        for seq, _, start, num, wave in claims[: len(want)]:
            assert (start, num) == (sum(queries[:seq]), queries[seq])
            # Eight heads, or so many that they have 800 queries; more whose keys fit into 100 tiles, up to 32.
            assert wave == min(max(min(-(-800 // num), 8), 100 // max(-(-keys[seq] // 128), 1)), 32)
        # Claims behind the last item know how many there are: one of them resets the counter.
        assert len(claims) > len(want) and all(claim[:2] == [count + 1, len(want)] for claim in claims[len(want) :])
