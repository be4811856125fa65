"""The additions of `kernels.gluon` to Gluon."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from fp8attn.kernels.gluon import aggregate, gl

pytestmark = pytest.mark.triton36


@aggregate
class Pair:
    a: gl.constexpr
    b: gl.tensor | gl.constexpr


def test_an_aggregate_takes_its_fields_by_position_or_by_name():
    for pair in (Pair(1, None), Pair(1, b=None), Pair(b=None, a=1)):
        assert pair.a.value == 1 and pair.b.value is None


@pytest.mark.parametrize(
    ("args", "named"), [((1,), {}), ((1, 2, 3), {}), ((1, 2), {"a": 1}), ((1,), {"c": 2}), ((1, 2), {"c": 3})]
)
def test_an_aggregate_takes_each_field_once(args, named):
    with pytest.raises(TypeError, match="Pair has the fields a, b: pass each of them once"):
        Pair(*args, **named)
