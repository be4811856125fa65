"""Options, and what is wrong with them."""

import pytest

from fp8attn import UsageError
from fp8attn.integrations.engine import Options


def test_options():
    assert Options.of({}, "config") == Options(None, key_dtype="int8")
    assert Options.of({"key_dtype": "e4m3"}, "config").key_dtype == "e4m3"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"skale": "x", "keys": "int8"}, "config has keys, skale; the options are scales, static_scales, key_dtype"),
        ({"key_dtype": "fp16"}, "key_dtype must be one of"),
        ({"static_scales": True}, "config has static_scales, which needs scales"),
        ({"exact": "false"}, "config has exact 'false'; it must be true or false, without quotes"),
        ({"static_scales": 1}, "has static_scales 1; it must be true or false"),
        ({"scales": True}, "has scales True; it must be a string"),
        ({"key_dtype": None}, "has key_dtype None; it must be a string"),
        (True, "config must be a JSON object of options; got True"),
    ],
)
def test_options_that_are_refused(given, message):
    with pytest.raises(UsageError) as error:
        Options.of(given, "config")
    assert message in str(error.value)
