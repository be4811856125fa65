"""Marks in the headers of pages, by which an engine knows the pages of another format."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from fp8attn import KVScales, LayerScales
from fp8attn.formats.page_layout import engine_marks_of
from fp8attn.formats.spec import PageSpec
from fp8attn.integrations.engine import Options, ServedModel
from fp8attn.integrations.engine.marks import check_marks, mark_of

from .models import SIZES, quantized, qwen2


def test_marks_differ_where_bytes_do(tmp_path):
    """The same tokens have other bytes with another type of keys, other means or other scales. Other options change no
    byte.
    """
    model = qwen2()
    model.save_pretrained(tmp_path / "plain")
    quantized(model, tmp_path / "quantized", "AWQ")
    LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=64)).save_pretrained(tmp_path / "llama")
    scales = KVScales(
        {0: LayerScales(*2 * [torch.ones(2)], *2 * [torch.zeros(2, 64)])}, num_layers=4, num_kv_heads=2, head_dim=64
    )
    scales.save(tmp_path / "scales.safetensors")
    file = str(tmp_path / "scales.safetensors")

    def of(options, model, context):
        return mark_of(options, ServedModel(str(tmp_path / model), None, context, num_layers=4, num_kv_heads=2))

    different = [
        (Options(), "plain", 1024), (Options(key_dtype="e4m3"), "plain", 1024), (Options(), "plain", 512),
        (Options(), "quantized", 1024),
        (Options(), "llama", 512), (Options(file), "plain", 1024), (Options(file, static_scales=True), "plain", 1024),
    ]  # fmt: skip
    found = [of(options, model, context) for options, model, context in different]
    assert len(set(found)) == len(different) and all(0 < mark < 2**63 for mark in found)
    assert of(Options(exact=True), "plain", 1024) == found[0]
    assert of(Options(), "llama", 1024) == found[4]  # without means the length does not matter
    model.model.layers[2].self_attn.k_proj.bias.data[0] += 1
    model.save_pretrained(tmp_path / "other")
    assert of(Options(), "other", 1024) not in found


def test_a_page_with_another_mark_is_an_error():
    nbytes = PageSpec.of(64).layout.nbytes
    pool = torch.full((9, 2, nbytes), 0x7F, dtype=torch.uint8)
    engine_marks_of(pool).fill_(77)
    table = torch.tensor([[3, 5, -1], [0, 8, 1]], dtype=torch.int32)
    check_marks(pool, table, 77)
    engine_marks_of(pool)[4] = 78  # not in the table
    check_marks(pool, table, 77)
    assert (pool[:, :, : nbytes - 120] == 0x7F).all() and (pool[:, :, nbytes - 112 :] == 0x7F).all()
    engine_marks_of(pool)[8] = 78
    with pytest.raises(RuntimeError, match=r"brought blocks of another format\. Engines .* must have the same options"):
        check_marks(pool, table, 77)
