"""The Hopper kernels against float64, by the checks of benchmarks/: every option, odd lengths, poison, graphs, equal bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp8attn
from fp8attn import PagedKVCache

ROOT = Path(__file__).resolve().parents[2]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_every_group_of_checks_passes(kernel):
    """Each group is a process of its own with a time limit, so that a hang or a crash fails by name."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", f"benchmarks.{kernel}_check"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, "\n".join(line for line in run.stdout.splitlines() if "ok " not in line)[-4000:]


@pytest.mark.parametrize("head_dim", [128, 256])
def test_without_an_lse_the_output_has_the_same_bits(head_dim):
    """Scores against K's means are then left out, but where softcap and sinks ask for them."""
    from fp8attn.kernels import prefill

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 700, head_dim, dtype=torch.bfloat16, device="cuda")
    q, pages = q.transpose(1, 2), fp8attn.ops.quantize(k, v)
    plain = dict(
        cu_seqlens_q=None, max_seqlen_q=700, causal=True, softmax_scale=0.1, window=0, softcap=0.0, sinks=None, leftpad_k=None,
    )  # fmt: skip
    for given in ({}, {"softcap": 20.0}, {"sinks": torch.randn(4, device="cuda")}):
        expected, _ = prefill.attention(q, pages, **plain | given)
        out, lse = prefill.attention(q, pages, **plain | given, return_lse=False)
        assert torch.equal(out, expected) and lse is None, given


@pytest.mark.parametrize("options", [{"backend": "cudagraphs"}, {"mode": "reduce-overhead"}], ids=["cudagraphs", "inductor"])
def test_the_first_step_may_be_the_warm_up_of_a_graph(options, monkeypatch):
    """What the kernels keep for good does not come from the pool of that graph, which tolerates nothing that lives on."""
    from fp8attn.kernels import counters

    for name in ("_streams", "_pools"):
        monkeypatch.setattr(counters, name, {})
    torch._dynamo.reset()
    torch.manual_seed(0)
    caches = [PagedKVCache(2, 128, num_seqs=2, num_pages=8, device="cuda") for _ in range(2)]
    prompt = torch.randn(2, 600, 2, 128, dtype=torch.bfloat16, device="cuda")
    for cache in caches:
        cache.append(*prompt)
        cache.reserve(400)
        for tensor in cache.pages.tensors:
            torch._dynamo.mark_static_address(tensor)
    queries = torch.randn(5, 2, 12, 128, dtype=torch.bfloat16, device="cuda")

    def step(x, pages):
        fp8attn.append(pages, x[:, :2], x[:, 2:4])
        return fp8attn.attention(x[:, 4:], pages)

    compiled = torch.compile(lambda x: step(x, caches[0].pages), fullgraph=True, **options)
    outs = [compiled(x).clone() for x in queries]
    assert counters._pools
    assert all(torch.equal(out, step(x, caches[1].pages)) for out, x in zip(outs, queries, strict=True))
