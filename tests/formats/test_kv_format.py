"""What the format of pages promises."""

import dataclasses

from fp8attn.formats.codec import E4M3, INT8
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.spec import PageSpec


def test_defaults():
    form = KVFormat(PageSpec.of(64).name)
    assert (form.k, form.v, form.rotate, form.stored_k_mean, form.v_mean) == (INT8, E4M3, True, None, None)


def test_compiled_code_can_make_one_with_any_release_of_pytorch():
    """Dynamo of PyTorch 2.11 wraps the default of each field, also of those that are given, and knows
    constants alone.
    """
    defaults = [field.default for field in dataclasses.fields(KVFormat) if field.default is not dataclasses.MISSING]
    assert all(default is None or isinstance(default, bool | int | float | str) for default in defaults)
