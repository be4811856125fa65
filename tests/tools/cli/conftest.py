"""A file of scales."""

import pytest


@pytest.fixture(scope="module")
def scales_file(tiny_model, tmp_path_factory):
    from tests.tools.cli.running import run_json

    path = tmp_path_factory.mktemp("scales") / "new" / "scales.safetensors"
    written = run_json("calibrate", "--model", tiny_model, "--out", path, "--context", 100, "--windows", 3)
    assert (written["tokens"], written["method"], len(written["rows"])) == (300, "absmax", 2)
    return path
