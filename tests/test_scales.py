"""KVScales: files keep all values, and invalid scales are refused with a message that says what to do."""

import os
import pickle
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8attn import KVScales, LayerScales
from fp8attn.errors import UsageError

HEADS, DIM = 2, 64


def layer(seed=0, **changes):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "k_scale": torch.rand(HEADS, generator=generator) + 0.01,
        "v_scale": torch.rand(HEADS, generator=generator) + 0.01,
        "k_mean": torch.randn(HEADS, DIM, generator=generator),
        "v_mean": torch.randn(HEADS, DIM, generator=generator),
    }
    return LayerScales(**tensors | changes)


def scales(**changes):
    values = {
        "layers": {0: layer(0), 2: layer(2)},
        "num_layers": 3,
        "num_kv_heads": HEADS,
        "head_dim": DIM,
        "model_id": "acme/tiny-7",
    }
    return KVScales(
        **values
        | {
            "tokens": 4096,
            "method": "percentile 99.9",
            "sqnr_db": {0: (31.5, 30.25), 2: (20.0, 10.0)},
            "k_offsets": {2: 12.5},
        }
        | changes
    )


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "scales.safetensors"
    scales().save(path)
    return path


def test_round_trip(saved):
    loaded, original = KVScales.load(saved), scales()
    names = (
        "num_layers",
        "num_kv_heads",
        "head_dim",
        "model_id",
        "tokens",
        "method",
        "sqnr_db",
        "k_offsets",
        "key_dtype",
        "rotate_keys",
    )
    for name in names:
        assert getattr(loaded, name) == getattr(original, name), name
    assert list(loaded.layers) == [0, 2]
    assert 0 in loaded
    assert 1 not in loaded
    for index in (0, 2):
        for name in ("k_scale", "v_scale", "k_mean", "v_mean"):
            assert torch.equal(getattr(loaded.layer(index), name), getattr(original.layer(index), name))


def test_a_scale_of_q_is_optional(tmp_path, saved):
    """A file without it is read, as files of older versions are; with it, it comes back."""
    assert KVScales.load(saved).layer(0).q_scale is None
    path, q = tmp_path / "q.safetensors", torch.rand(6) + 0.1
    scales(layers={0: layer(0, q_scale=q), 2: layer(2)}).save(path)
    loaded = KVScales.load(path)
    assert torch.equal(loaded.layer(0).q_scale, q) and loaded.layer(2).q_scale is None
    for wrong, message in (
        (torch.ones(5), r"q_scale must be \[4\] float32, not \[5\]"),
        (-q, "q_scale must be positive and finite"),
    ):
        with pytest.raises(ValueError, match=message):
            scales(layers={0: layer(0, q_scale=wrong)})


@pytest.mark.parametrize("way", [{"key_dtype": "e4m3"}, {"rotate_keys": False}])
def test_how_keys_are_stored_is_saved(tmp_path, way):
    path = tmp_path / "scales.safetensors"
    made = scales(layers={0: layer(0, **way), 2: layer(2, **way)})
    made.save(path)
    loaded = KVScales.load(path)
    assert (
        (loaded.key_dtype, loaded.rotate_keys)
        == (made.key_dtype, made.rotate_keys)
        == (
            way.get("key_dtype", "int8"),
            way.get("rotate_keys", True),
        )
    )
    assert loaded.layer(2).key_dtype == made.key_dtype and loaded.layer(2).rotate_keys == made.rotate_keys
    shape = {"num_layers": 3, "num_kv_heads": HEADS, "head_dim": DIM}
    made.check(**shape, key_dtype=made.key_dtype, rotate_keys=made.rotate_keys)
    with pytest.raises(
        ValueError,
        match=r"and the cache has key_dtype='int8', rotate_keys=True; make the cache with the scales' options, or "
        r"calibrate",
    ):
        made.check(**shape, key_dtype="int8", rotate_keys=True)


def test_a_repr_says_what_they_are():
    each = "LayerScales(2 KV heads of 64, int8 keys, rotated)"
    assert repr(scales()) == f"KVScales(layers 0, 2 of 'acme/tiny-7', percentile 99.9, 4096 tokens, {each} each)"


def test_layers_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"differ in \(key_dtype, rotate_keys\): \('e4m3', True\), \('int8', True\)"):
        scales(layers={0: layer(0), 2: layer(2, key_dtype="e4m3")})
    with pytest.raises(ValueError, match="key_dtype must be one of 'int8', 'e4m3'; got 'int4'"):
        scales(layers={0: layer(0, key_dtype="int4")})


def test_a_file_of_the_first_format_is_named(saved):
    save_file(load_file(saved), saved, metadata_of(saved) | {"format": "fp8attn.kv_scales.1"})
    with pytest.raises(ValueError, match=r"kv_scales.2\): it was written by an older fp8attn.*calibrate again"):
        KVScales.load(saved)


def test_tensor_names_are_those_of_the_model(saved):
    assert "model.layers.2.self_attn.k_scale" in load_file(saved)
    assert len(load_file(saved)) == 8


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_file_has_the_permissions_of_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        scales().save(tmp_path / "scales.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "scales.safetensors").stat().st_mode) == mode


def test_save_makes_folders(tmp_path):
    scales().save(tmp_path / "a" / "b" / "scales.safetensors")
    assert KVScales.load(tmp_path / "a" / "b" / "scales.safetensors").tokens == 4096
    with pytest.raises(UsageError, match="is a folder; give the name of a file"):
        scales().save(tmp_path / "a")


def test_missing_layer():
    with pytest.raises(ValueError, match=r"layer 1 has no scales \(these are for layers 0, 2\); keep it in 16 bits"):
        scales().layer(1)


def test_layers_are_named_in_runs():
    with pytest.raises(ValueError, match="for layers 0-2, 5"):
        scales(layers={i: layer(i) for i in (0, 1, 2, 5)}, num_layers=6).layer(3)


def test_check():
    shape = {"num_layers": 3, "num_kv_heads": HEADS, "head_dim": DIM}
    scales().check(**shape)
    scales().check(**shape, model_id="/data/models/tiny-7")  # a local copy of the same model
    with pytest.raises(ValueError, match=r"head_dim is 64 in the scales and 128 in the model.*calibrate again"):
        scales().check(**shape | {"head_dim": 128})
    with pytest.raises(ValueError, match=r"num_layers is 3 .* and 4 .*; num_kv_heads is 2 .* and 8"):
        scales().check(num_layers=4, num_kv_heads=8, head_dim=DIM)
    with pytest.raises(ValueError, match="the scales are for 'acme/tiny-7' and the model is 'acme/tiny-8'"):
        scales().check(**shape, model_id="acme/tiny-8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_scale": torch.tensor([1.0, 0.0])}, "k_scale must be positive and finite"),
        ({"v_scale": torch.tensor([1.0, -2.0])}, "v_scale must be positive and finite"),
        ({"v_scale": torch.tensor([torch.nan, 1.0])}, "v_scale must be positive and finite"),
        ({"k_mean": torch.full((HEADS, DIM), torch.inf)}, "k_mean must be finite"),
        ({"k_mean": torch.zeros(HEADS, 128)}, r"k_mean must be \[2, 64\] float32, not \[2, 128\]"),
        (
            {"k_scale": torch.ones(HEADS, dtype=torch.float64)},
            r"k_scale must be \[2\] float32, not \[2\] torch.float64",
        ),
    ],
)
def test_values_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=f"layer 0: {message}.*calibrate again"):
        scales(layers={0: layer(**changes)})


def test_a_saved_nan_is_found_on_loading(saved):
    tensors = load_file(saved)
    tensors["model.layers.2.self_attn.v_scale"][1] = torch.nan
    metadata = metadata_of(saved)
    save_file(tensors, saved, metadata)
    with pytest.raises(ValueError, match="layer 2: v_scale must be positive and finite"):
        KVScales.load(saved)


def metadata_of(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return file.metadata()


def test_no_layers():
    with pytest.raises(ValueError, match="no layers in these scales"):
        scales(layers={})
    with pytest.raises(ValueError, match="scales for layer 2 of a model of 2 layers"):
        scales(num_layers=2)


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"no such file: .*nowhere; `fp8attn calibrate` writes one"):
        KVScales.load(tmp_path / "nowhere")


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_truncated_file(saved, length):
    saved.write_bytes(saved.read_bytes()[:length])
    with pytest.raises(ValueError, match="not a safetensors file, or it is cut short"):
        KVScales.load(saved)


def test_a_pickle_is_refused_and_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("the file was executed",))

    path = tmp_path / "scales.pt"
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="not a safetensors file"):
        KVScales.load(path)


def test_foreign_files(tmp_path, saved):
    path = tmp_path / "foreign.safetensors"
    save_file({"model.embed_tokens.weight": torch.ones(2)}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"does not hold fp8attn scales.*its format is 'pt'"):
        KVScales.load(path)
    save_file({"x": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="it has no format"):
        KVScales.load(path)
    save_file(load_file(saved) | {"lm_head.weight": torch.ones(2)}, path, metadata_of(saved))
    with pytest.raises(ValueError, match=r"a tensor 'lm_head.weight' that fp8attn does not write"):
        KVScales.load(path)


def test_incomplete_files(tmp_path, saved):
    path = tmp_path / "incomplete.safetensors"
    tensors, metadata = load_file(saved), metadata_of(saved)
    save_file(
        {name: tensor for name, tensor in tensors.items() if "layers.2.self_attn.v_mean" not in name}, path, metadata
    )
    with pytest.raises(ValueError, match="layer 2 has no v_mean"):
        KVScales.load(path)
    save_file(tensors, path, {name: value for name, value in metadata.items() if name != "tokens"})
    with pytest.raises(ValueError, match=r"metadata is incomplete.*tokens"):
        KVScales.load(path)
    save_file(tensors, path, metadata | {"num_layers": "many"})
    with pytest.raises(ValueError, match="metadata is incomplete or not as written"):
        KVScales.load(path)
