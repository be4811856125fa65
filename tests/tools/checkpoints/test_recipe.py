"""Which layers are in 8 bits, as ModelOpt's metadata beside a checkpoint."""

import json

import pytest

pytest.importorskip("transformers")

from fp8attn import UsageError, __version__
from fp8attn_tools.checkpoints.recipe import layers_to_choose, write_recipe
from tests.tools.checkpoints.test_checkpoints import edit, save


def test_the_recipe_has_modelopts_keys(tmp_path):
    """The keys of ModelOpt's exporter for 16-bit weights: one format of all layers, or `MIXED_PRECISION`."""
    folder = save(tmp_path / "model")
    config = (folder / "config.json").read_bytes()
    for in_8_bits, algorithm in (((2, 0), "MIXED_PRECISION"), ((0, 1, 2), "FP8")):  # the second replaces the first
        path = write_recipe(folder, layers_to_choose(folder), in_8_bits)
        assert path == folder / "hf_quant_config.json" and json.loads(path.read_text()) == {
            "producer": {"name": "fp8attn", "version": __version__},
            "quantization": {
                "quant_algo": None,
                "quantized_layers": {},
                "kv_cache_quant_algo": algorithm,
                "kv_cache_quantized_layers": {
                    f"model.layers.{index}.self_attn": {"quant_algo": "FP8"} for index in sorted(in_8_bits)
                },
                "kv_cache_schema_version": 1,
            },
        }
    assert (folder / "config.json").read_bytes() == config


def test_another_programs_metadata_is_kept(tmp_path):
    folder = save(tmp_path / "model")
    with pytest.raises(UsageError, match=r"attention in layers 0-2, and not in layer 3: it is another model's"):
        write_recipe(folder, layers_to_choose(folder), [1, 3])
    (folder / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}}')
    with pytest.raises(UsageError, match=r"hf_quant_config.json was written by modelopt; remove it"):
        layers_to_choose(folder)
    edit("config.json", lambda values: values.update(quantization_config={"quant_method": "fp8"}))(folder)
    with pytest.raises(UsageError, match=r"has a quantization_config, .* choose layers for the 16-bit checkpoint"):
        layers_to_choose(folder)
