"""Pictures are drawn from the committed rows."""

import pytest

pytest.importorskip("matplotlib")

from evidence import pictures

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", pictures.PLOTS)
def test_a_picture_is_drawn(name, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "path_of", lambda name: tmp_path / f"{name}.json")
    pictures.PLOTS[name]()
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
