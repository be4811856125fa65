"""The choice of a backend, its reasons, and what backends share."""

import subprocess
import sys

import pytest
import torch

import fp8attn
from fp8attn import BACKENDS, AttentionParams, KVPages, UsageError, select_backend, unsupported_reason
from fp8attn.backends import DENSE_BACKENDS, find, hopper, load, reference, triton
from fp8attn.formats.codec import INT8
from fp8attn.formats.spec import PageSpec


def test_backends_say_why_not(monkeypatch):
    assert BACKENDS == ("hopper", "triton", "reference")
    assert unsupported_reason("reference", "cpu", torch.float32) is None
    assert unsupported_reason("triton", "cuda", torch.bfloat16) is None
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "are for NVIDIA GPUs, not cpu" in unsupported_reason("hopper", "cpu", torch.bfloat16)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for capability, dtype, reason in (((8, 9), torch.float16, "not 8.9"), ((9, 0), torch.float32, "not torch.float32")):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device, capability=capability: capability)
        assert reason in unsupported_reason("hopper", "cuda", dtype)
    assert (
        unsupported_reason("hopper", "cuda", torch.bfloat16) is None
        and select_backend("auto", "cuda", torch.float16) == "hopper"
    )
    reason = "take a head_dim of up to 256, not 512; the backend 'triton' takes it"
    assert (
        reason in unsupported_reason("hopper", "cuda", torch.float16, 512)
        and select_backend("auto", "cuda", head_dim=512) == "triton"
    )
    with pytest.raises(ValueError, match=r"'hopper' cannot run here: .* not 512"):
        select_backend("hopper", "cuda", torch.float16, 512)
    assert "no Triton on cpu" in unsupported_reason("triton", "cpu", torch.bfloat16)
    monkeypatch.setattr(triton, "TRITON_INSTALLED", False)
    assert "not installed" in unsupported_reason("triton", "cuda", torch.bfloat16)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (PageSpec(576, 448, INT8, v_in_k=True), "k576.int8-v448.int8-v_in_k-token_scales"),
        (PageSpec(128, 64, INT8), "k128.int8-v64.e4m3"),
    ],
)
def test_every_backend_refuses_pages_that_do_not_exist_by_name(spec, named, monkeypatch):
    monkeypatch.setattr(hopper, "no_hopper_reason", lambda *args: None)
    monkeypatch.setattr(hopper, "_has_gluon", lambda: True)
    monkeypatch.setattr(triton, "TRITON_INSTALLED", True)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for backend, device in (
        (hopper.Hopper, gpu),
        (triton.Triton, gpu),
        (reference.Reference, cpu),
        (reference.Reference, gpu),
    ):
        assert f"there are no pages {named}: K and V must" in backend.supports(spec, torch.bfloat16, device)
        with pytest.raises(
            ValueError, match=f"backend '{backend.name}' cannot run here: there are no pages {named}: .*latent.$"
        ):
            select_backend(backend.name, device, torch.bfloat16, spec)
        assert backend.supports(PageSpec.of(64), torch.bfloat16, device) is None


def test_auto_never_falls_back_from_a_gpu():
    assert select_backend("auto", "cpu", torch.bfloat16) == "reference"
    assert select_backend("auto", "cuda", torch.float16) == "triton"
    with pytest.raises(ValueError, match="backend='reference' runs anywhere, slowly"):
        select_backend("auto", "cuda", torch.float32)
    assert unsupported_reason("auto", "cpu") is None and unsupported_reason("auto", "cuda", torch.float16) is None
    assert unsupported_reason("auto", "cuda", torch.float32) == unsupported_reason("triton", "cuda", torch.float32)
    with pytest.raises(
        ValueError, match="unknown backend 'cuda'; choose 'auto', 'hopper', 'triton', 'reference', 'fa3'"
    ):
        unsupported_reason("cuda", "cpu")


def test_fa3_has_reasons_and_takes_no_pages():
    assert (*BACKENDS, "fa3") == DENSE_BACKENDS
    assert unsupported_reason("fa3", "cpu") == "FlashAttention-3 is for NVIDIA GPUs, not cpu"
    with pytest.raises(
        ValueError, match="'fa3' takes dense K and V, not pages; choose 'auto', 'hopper', 'triton', 'reference'"
    ):
        select_backend("fa3", "cpu", torch.bfloat16)


@pytest.mark.parametrize(
    ("version", "works"), [("3.4.0", False), ("3.5.1", False), ("3.6.0", True), ("3.10.0+git123", True), ("4.0", True)]
)
def test_the_hopper_kernels_need_triton_3_6(version, works, monkeypatch):
    """Triton 3.4 and 3.5 have a Gluon for Hopper too, with another API."""
    monkeypatch.setattr(triton, "TRITON_INSTALLED", True)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    monkeypatch.setattr(hopper, "no_hopper_reason", lambda *args: None)
    monkeypatch.setattr(hopper, "_has_gluon", hopper._has_gluon.__wrapped__)  # which keeps its answer
    reason = unsupported_reason("hopper", "cuda")
    assert reason is None if works else "older than 3.6" in reason


def test_kernels_are_imported_when_a_backend_is_chosen():
    """Before that, only the modules that give reasons are imported. They need no Triton."""
    code = """
import sys, fp8attn
print(sorted(m for m in sys.modules if m.startswith("fp8attn.kernels.")))
fp8attn.backends.load("reference")
print("triton" in sys.modules)
"""
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert printed == ["['fp8attn.kernels.machine']", "False"]


def test_one_backend_is_made_once():
    cpu, found = torch.device("cpu"), load("reference")
    assert (
        find("auto", cpu, torch.float32, PageSpec.of(64).name)
        is found
        is find("reference", cpu, torch.float16, PageSpec.of(512).name)
    )


def test_dense_queries_are_tokens():
    """`[num_seqs, S, num_q_heads, head_dim]` of any strides: values of the tokens, in q's order."""
    torch.manual_seed(0)
    pages = fp8attn.from_dense(*(torch.randn(2, 2, 40, 64) for _ in "kv"))
    params = AttentionParams(None, 30, True, 0.125)
    for q in (torch.randn(2, 30, 4, 64), torch.randn(2, 4, 30, 64).transpose(1, 2)):
        expected, expected_lse = load("reference").attention(q.flatten(0, 1), pages, params)
        out, lse = load("reference").attention(q, pages, params)
        assert torch.equal(out.flatten(0, 1), expected) and torch.equal(lse.flatten(0, 1), expected_lse)
        assert out.stride() == q.stride()


def test_hopper_chooses_by_the_query_rows_of_a_kv_head(monkeypatch):
    """Up to 128 rows go to `decode`; more go to `prefill`. Both get the given output."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    backend, calls = load("hopper"), []
    for name in ("decode", "prefill"):
        kernel = lambda q, pages, params, out, new_keys=0, name=name: calls.append((name, params, out)) or (q, q)  # noqa: E731
        monkeypatch.setattr(f"fp8attn.kernels.{name}.{name}_attention", kernel)
    pages = KVPages.empty(4, 2, 64, 2, 2)
    for tokens, expected in ((32, "decode"), (33, "prefill")):
        params = AttentionParams(None, tokens, True, 0.125)
        given = torch.full((2 * tokens, 8, 64), torch.nan)
        backend.attention(torch.zeros(2 * tokens, 8, 64), pages, params, given)
        name, got, out = calls.pop()
        assert name == expected and got is params and out is given
    idle = AttentionParams(torch.zeros(3, dtype=torch.int32), 0, True, 0.125)
    for given in (None, torch.full((5, 8, 64), torch.nan)):
        out, lse = backend.attention(torch.ones(5, 8, 64), pages, idle, given)
        assert not calls and not out.any() and (lse == -torch.inf).all() and (given is None or out is given)


@pytest.mark.parametrize(
    ("spec", "heads", "options", "kernel"),
    [
        (PageSpec.latent(512, 64), 128, {}, "latent_decode"),
        (PageSpec.latent(256, 32), 40, {"max_seqlen_q": 4}, "latent_decode"),
        (PageSpec.latent(1024, 64), 16, {}, "latent_attention"),
        (PageSpec.latent(512, 64), 16, {"max_seqlen_q": 600}, "latent_decode"),
        (PageSpec.latent(512, 64), 16, {"window": 50}, "latent_attention"),
        (PageSpec.latent(512, 64), 16, {"leftpad_k": torch.zeros(1, dtype=torch.int32)}, "latent_decode"),
        (PageSpec.latent(512, 128, rope_in_codes=True), 16, {}, "latent_decode"),
    ],
    ids=str,
)
def test_hopper_chooses_the_kernel_of_latents(spec, heads, options, kernel, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    backend = hopper.Hopper()
    called = []
    for module, name in ((backend._latent, "latent_attention"), (backend._latent_decode, "latent_decode")):
        monkeypatch.setattr(module, name, lambda q, pages, *args, name=name: called.append(name) or (q, q))
    params = AttentionParams(None, **{"max_seqlen_q": 1, "causal": True, "softmax_scale": 0.1} | options)
    pages, q = KVPages.empty(2, 1, spec, 1, 2), torch.zeros(params.max_seqlen_q, heads, spec.k_dim).half()
    backend.attention(q, pages, params)
    assert called == [kernel]
    with pytest.raises(UsageError, match="cannot keep batch_invariant"):
        backend.attention(q, pages, params._replace(batch_invariant=True))
