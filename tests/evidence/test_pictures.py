"""Pictures are drawn from the committed rows."""

import pytest

pytest.importorskip("matplotlib")

from evidence import pictures


@pytest.mark.parametrize("name", pictures.PLOTS)
def test_a_picture_is_drawn(name, tmp_path, monkeypatch):
    (tmp_path / f"{name}.json").symlink_to(pictures.FOLDER / f"{name}.json")
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.PLOTS[name]()
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
