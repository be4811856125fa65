"""One thread for each worker; Triton's interpreter where there is no GPU; no coverage of what it would only slow; a
small model and tokenizer, built in every session."""

import gc
import lzma
import os
import string
import sys
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest


@contextmanager
def untraced():
    """Coverage measures nothing here. Its trace function makes Python 3.11 take its slow path for every instruction of
    every module, not only of those that are measured."""
    trace = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(trace)


with untraced():
    import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of Triton, which looks once

# The workers of xdist share the cores: two threads in each wait for each other more than they work.
torch.set_num_threads(1)

# What most of the tests import takes half as long again where it is traced. The process that only starts workers needs
# none of it.
if sys.gettrace() is not None and "PYTEST_XDIST_WORKER" in os.environ:
    with untraced():
        for name in ("transformers.generation.utils", "diffusers.models.transformers", "matplotlib.pyplot"):
            import_module(name)


def pytest_configure():
    """Triton's interpreter replaces the functions of `triton.language` by its own at every launch, and again wherever a
    kernel calls a `triton.jit` function. Those calls find all replaced: without this, kernels take nearly twice the
    time. Coverage does not measure kernels."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[ModuleType] = set()  # in this launch

    @cache
    def modules(function):
        return {x for x in function.__globals__.values() if isinstance(x, ModuleType)} & {
            interpreter.tl,
            interpreter.tl.core,
        }

    def replace_once(function):
        if modules(function) <= replaced:
            return interpreter._LangPatchScope()
        replaced.update(modules(function))
        return replace(function)

    def launch_anew(executor, *args, **kwargs):
        replaced.clear()
        with untraced():
            return launch(executor, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch_anew


def pytest_collection_finish():
    """Collections of garbage need not look at what is imported."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Coverage measures no slow tests and none of kernels: most of their time is Dynamo's, transformers' and Triton's.
    What they run of fp8attn, others run, too."""
    if item.get_closest_marker("slow") is None and not item.nodeid.startswith("tests/kernels/"):
        return (yield)
    with untraced():
        return (yield)


@pytest.fixture(autouse=True)
def _default_dtype_stays():
    """Otherwise the tests after it in this worker compute in another precision."""
    yield
    left = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert left == torch.float32


def byte_tokenizer():
    """One token a byte, and an end of text: any text has a known number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({"<end>": 0, **{symbol: number for number, symbol in enumerate(alphabet, 1)}}, []))
    inner.add_special_tokens(["<end>"])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder with a random two-layer Llama (biases give K and V an offset), its tokenizer and a held-out text of
    16,384 bytes.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64, max_position_embeddings=4096, attention_bias=True, bos_token_id=None, eos_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name or "embed" in name:
                weight.normal_(0, 0.5 if name.endswith("bias") else 0.15)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    names = zip(string.ascii_letters * 12, "xyzuvw" * 104, strict=True)
    lines = (f"value_{a}{b} = function_{b}({a!r}, {number})\n" for number, (a, b) in enumerate(names))
    (folder / "heldout.txt.xz").write_bytes(lzma.compress("".join(lines).encode()[:16384]))
    return folder


@pytest.fixture(scope="module")
def loaded(tiny_model):
    """That model and its tokenizer, loaded."""
    from fp8attn_tools.evaluation import models

    return models.load(tiny_model, device="cpu")


@pytest.fixture(scope="module")
def tokens(loaded, tiny_model):
    """That text as tokens."""
    from fp8attn_tools.evaluation import models

    return models.tokenize(loaded[1], models.read_text(model=tiny_model))


@pytest.fixture
def builds(monkeypatch):
    """Replaces the builds of FlashAttention-3 that there are: `builds(fa3_fwd_interface=Fake(...))`."""
    from fp8attn.backends import fa3

    def install(**fakes):
        names = {
            name: (fakes[name].namespace if name in fakes else "fp8attn_no_such", "fp8attn_no_such", "*.so")
            for name in fa3.BUILDS
        }
        monkeypatch.setattr(fa3, "BUILDS", names)

    fa3.find.cache_clear()
    fa3.default.cache_clear()
    yield install
    fa3.find.cache_clear()
    fa3.default.cache_clear()
