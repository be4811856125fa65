"""A static ring has a page table as wide as its longest sequence. No plan follows the columns that a window does not
see.
"""

import pytest

pytest.importorskip("triton")

from tests.support import compiling


@pytest.mark.parametrize("kernel", ["decode", "prefill", "portable"])
def test_plans_of_windows_do_not_follow_the_width_of_the_table(kernel):
    narrow, wide = (
        compiling.call("tests.kernels.window_plans", "numbers", kernel, columns, 384) for columns in (11, 1001)
    )
    assert narrow == wide and narrow
    if kernel != "decode":  # without a window they do; the plan of decode follows no width, and its kernel the lengths
        assert compiling.call("tests.kernels.window_plans", "numbers", kernel, 1001, 0) != wide
