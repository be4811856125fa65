"""The emulator's check of what orders accesses to shared memory: it must report each fault, in whatever order warps
happen to run.
"""

import numpy as np
import pytest

from tests.emulator.order import Order

FULL, EMPTY = 4096, 4104  # barriers
STAGE, WORD = slice(0, 64), np.array([64])
CONSUMER, LATE, PRODUCER = 0, 1, 4  # warps; the first two are of one warpgroup


@pytest.fixture
def order() -> Order:
    """A stage that TMA has filled for the consumers."""
    order = Order(8, 8192)
    for barrier in FULL, EMPTY:
        order.init(PRODUCER, barrier)
    order.fence(PRODUCER)
    order.meet(list(range(8)))
    fill(order)
    order.wait(CONSUMER, FULL)
    return order


def fill(order: Order) -> None:
    order.fetch(PRODUCER, STAGE, FULL)
    order.arrive(PRODUCER, FULL)
    order.end(FULL)


def release(order: Order, warp: int = CONSUMER) -> None:
    order.arrive(warp, EMPTY)
    order.end(EMPTY)
    order.wait(PRODUCER, EMPTY)


def multiply(order: Order) -> None:
    for warp in CONSUMER, LATE:
        order.multiply(warp, STAGE)
        order.commit(warp)


def test_a_stage_is_released_when_its_products_have_ended(order):
    order.wait(LATE, FULL)
    multiply(order)
    for warp in CONSUMER, LATE:
        order.multiplied(warp, 0)
    release(order)  # without a barrier: products end for all warps of the warpgroup
    fill(order)


def test_a_stage_is_released_before_its_products_have_ended(order):
    order.wait(LATE, FULL)
    multiply(order)
    order.multiplied(CONSUMER, 1)
    release(order)
    with pytest.raises(AssertionError, match="nothing orders this write after a read by products of warpgroup 0"):
        fill(order)


def test_a_stage_is_read_before_it_is_full(order):
    with pytest.raises(AssertionError, match="nothing orders this after a write by"):
        order.multiply(LATE, STAGE)


def test_a_warp_that_waits_late_may_miss_a_phase(order):
    order.wait(LATE, FULL)
    release(order)
    order.fetch(PRODUCER, STAGE, FULL)
    order.arrive(PRODUCER, FULL)
    with pytest.raises(AssertionError, match="warp 1 may miss phase 1"):
        order.end(FULL)


def test_loads_may_be_under_way_when_tma_writes(order):
    order.load(CONSUMER, WORD - 1, ["%r1"])
    with pytest.raises(AssertionError, match=r"%r1.*a fence is missing"):
        order.arrive(CONSUMER, EMPTY)
    order.fence(CONSUMER)
    release(order)
    fill(order)


def test_products_see_what_is_written_after_a_fence(order):
    order.store(CONSUMER, WORD)
    with pytest.raises(AssertionError, match="no fence has shown the async proxy what warp 0 wrote"):
        order.multiply(CONSUMER, WORD)
    order.fence(CONSUMER)
    with pytest.raises(AssertionError, match="nothing orders this after a write by warp 0"):
        order.multiply(LATE, WORD)
    order.meet([CONSUMER, LATE])
    order.multiply(LATE, WORD)


def test_memory_is_written_again_after_tma_has_read_it(order):
    order.send(CONSUMER, STAGE, 1)
    with pytest.raises(AssertionError, match="nothing orders this write after a read by TMA of warp 0"):
        order.store(CONSUMER, WORD - 1)
    order.sent(CONSUMER, 1)
    order.store(CONSUMER, WORD - 1)


def test_tma_sees_a_barrier_after_a_fence(order):
    order.init(PRODUCER, EMPTY + 8)
    with pytest.raises(AssertionError, match="no fence has shown TMA the barrier"):
        order.fetch(PRODUCER, STAGE, EMPTY + 8)


def test_words_of_cp_async_are_there_when_their_barriers_phase_ends(order):
    order.copy(PRODUCER, WORD)
    order.arrive_with_copies(PRODUCER, EMPTY)
    with pytest.raises(AssertionError, match="nothing orders this after a write by"):
        order.load(CONSUMER, WORD, [])
    order.end(EMPTY)
    order.wait(CONSUMER, EMPTY)
    order.load(CONSUMER, WORD, [])
