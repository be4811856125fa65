"""`warmup` compiles kernels that are then found, and its errors say what it needs. No GPU is needed."""

import json

import pytest
import torch
from transformers import Gemma4TextConfig, GptOssConfig, LlamaConfig

import fp8attn
from fp8attn.integrations import warmup
from tests.support import compiling, machines

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
pytest.importorskip("typer")

from typer.testing import CliRunner

from fp8attn_tools.cli.app import app

SHAPE = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}


FEW_CALLS = """
import json, sys
from pathlib import Path
import fp8attn
from fp8attn.precompile import calls
from fp8attn_tools.cli.app import app
from tests.support.machines import pretended
from typer.testing import CliRunner
calls.STEPS, calls.PROMPTS, calls.BATCHES, calls.BEFORE = (1,), (), (1,), (0,)
folder, reported = Path(sys.argv[1]), []
shape = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64}
with pretended("sm_80"):
    first = fp8attn.warmup(**shape, progress=lambda *counts: reported.append(counts))
    files = [len([*folder.glob("*/*.cubin")])]
    again = json.loads(CliRunner().invoke(app, ["warmup", "--shape", "8,2,64", "--json"]).stdout)
files.append(len([*folder.glob("*/*.cubin")]))
try:
    with pretended("sm_90"):
        fp8attn.warmup(**shape)
except fp8attn.UsageError as error:
    refused = str(error)
print(json.dumps({"first": first, "again": again["kernels"], "reported": reported, "files": files, "refused": refused}))
"""


@pytest.mark.slow
def test_a_kernel_is_compiled_and_then_found(tmp_path):
    """All steps, for a few calls of the portable kernels, in a process without the interpreter."""
    found = json.loads(compiling.run("-c", FEW_CALLS, tmp_path, TRITON_CACHE_DIR=str(tmp_path)))
    names = sorted(name for name, _ in found["first"])
    assert {*names} == {"portable_kernel", "step_kernel", "page_kernel", "_combine_kernel"}
    assert found["reported"] == [[done, len(names)] for done in range(len(names) + 1)]
    assert found["files"] == [len(names)] * 2 and sorted(kernel["name"] for kernel in found["again"]) == names
    assert "this process has planned launches for another GPU than cuda" in found["refused"]


@pytest.mark.parametrize("shape", ["32,8", "32,8,128,1", "32,x,128"])
def test_a_shape_is_three_numbers(shape):
    result = CliRunner().invoke(app, ["warmup", "--shape", shape], catch_exceptions=False)
    assert result.exit_code == 2 and "--shape must be" in result.output


@pytest.mark.slow
def test_a_compiler_that_fails_is_an_error():
    """Each kernel is tried, and Triton's error is raised."""
    program = """
from fp8attn.kernels import compile
from fp8attn.precompile import calls
import fp8attn
from tests.support.machines import pretended
calls.STEPS, calls.PROMPTS, calls.BATCHES, calls.BEFORE = (1,), (), (1,), (0,)
def fail(*given, **target):
    raise OSError("no compiler here")
compile.compiled = fail
try:
    with pretended("sm_80"):
        fp8attn.warmup(num_q_heads=8, num_kv_heads=2, head_dim=64)
except OSError as error:
    print(error)
"""
    assert compiling.run("-c", program) == "no compiler here\n"


def test_the_interpreter_compiles_nothing(monkeypatch):
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", True)
    with machines.pretended("sm_80"), pytest.raises(fp8attn.UsageError, match="interprets them: unset it"):
        fp8attn.warmup(**SHAPE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give a transformers config, or all of"),
        ({"num_q_heads": 32}, "give a transformers config, or all of"),
        (SHAPE | {"device": "cpu"}, "cpu is not a GPU. Run it on the machine that will serve"),
        (
            SHAPE | {"dtype": torch.float32},
            "torch.bfloat16 or torch.float16, which the kernels take; got torch.float32",
        ),
        (
            SHAPE | {"dtype": "bfloat16"},
            "torch.bfloat16 or torch.float16, which the kernels take; got 'bfloat16'",
        ),
        (SHAPE | {"attention": "window"}, r"pass \('window',\)"),
        (SHAPE | {"head_dim": 100}, "head_dim must be one of"),
        (SHAPE | {"num_kv_heads": 5}, "multiple of num_kv_heads"),
        (SHAPE | {"key_dtype": "int4"}, "key_dtype must be one of"),
    ],
)
def test_what_it_cannot_compile(options, message):
    with pytest.raises(ValueError, match=message):
        fp8attn.warmup(**options)


def test_a_config_says_the_shape_and_what_attention_has(monkeypatch):
    def read(config):
        [layer] = fp8attn.warmup(config)
        return (
            (layer.num_q_heads, layer.num_kv_heads, layer.head_dim),
            "softcap" in layer.attention,
            "sinks" in layer.attention,
        )

    monkeypatch.setattr(warmup, "compile_kernels", lambda layers, *_, **__: layers)
    llama = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8)
    assert read(llama) == (tuple(SHAPE.values()), False, False)
    sinks = GptOssConfig(num_attention_heads=64, num_key_value_heads=8, head_dim=64)
    assert read(sinks) == ((64, 8, 64), False, True)
    llama.attn_logit_softcapping = 30.0
    assert read(llama)[1]


def test_a_config_may_have_layers_of_several_shapes(monkeypatch):
    """Windows are those of their layers."""
    monkeypatch.setattr(warmup, "compile_kernels", lambda layers, *_, **__: layers)
    config = Gemma4TextConfig(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
    )
    found = [(layer.num_kv_heads, layer.head_dim, sorted(layer.attention)) for layer in fp8attn.warmup(config)]
    assert found == [(4, 256, []), (4, 256, ["window"]), (2, 512, [])]
