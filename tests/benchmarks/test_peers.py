"""The peers, as far as they need no GPU: what they are given, what they refuse, how they are compiled."""

import lzma
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import get_peers, peers, problem, wide
from benchmarks.peers import (
    comfy,
    cudnn,
    fa4,
    flash,
    flashinfer,
    hpc_ops,
    pages,
    peer,
    rounded,
    sage,
    torch_sdpa,
    vllm_fa3,
)
from benchmarks.problem import Shape
from fp8attn.formats.codec import FP8

STEP = Shape((70, 130, 5), (1, 1, 1), 8, 2, 128, True)
PROMPT = Shape((200,), (200,), 4, 2, 128, True)


def test_a_file_is_a_peer(monkeypatch, tmp_path):
    """A new file is in `make peers`, in the benchmarks and in the tables, with no other file changed."""
    (tmp_path / "made.py").write_text(
        "from benchmarks.peers.peer import Call, Peer, Wheel\n"
        "PEER = Peer({'made': Call(None, 'Made', '#123456', prefill=True, levels=1)}, (Wheel('made==1.0'),), "
        "release=lambda: 'made 1.0')\n"
    )
    monkeypatch.setattr(peers, "__path__", [*peers.__path__, str(tmp_path)])
    found = peers._found()
    assert found.keys() == {*peers.PEERS, "made"}
    assert peers.PEERS.keys() == {
        path.stem for path in Path(peers.__file__).parent.glob("*.py") if "\nPEER = " in path.read_text()
    }
    monkeypatch.setattr(peers, "PEERS", found)
    monkeypatch.setattr(peers, "available", lambda: found.keys())
    assert peers.of("made") == "made" and peers.of("vllm-fa3-fp8-split") == "vllm_fa3" and peers.of("fp8attn") is None
    assert peers.releases(["fp8attn", "made", "fa3-bf16"]) == {"made": "made 1.0", "fa3": "fa3-fwd==0.0.3"}


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
def test_pages_hold_each_sequence_in_order_and_zeros_behind_it(heads_first, dtype):
    _, k, v = (x.to(dtype) for x in STEP.inputs())
    made = pages.fill(STEP, k, v, heads_first=heads_first)
    assert made.pool.shape[2:] == (
        (2, pages.SIZE, 128) if heads_first else (pages.SIZE, 2, 128)
    ) and made.used.tolist() == [70, 130, 5]
    held = set()
    for seq, (length, count) in enumerate(zip(STEP.keys, (2, 3, 1), strict=True)):
        ids = made.table[seq, :count].tolist()
        held |= set(ids)
        for stored, given in zip((made.k, made.v), STEP.split(k, v)(seq), strict=True):
            rows = torch.cat([stored[i] for i in ids]).float()
            assert torch.equal(rows[:length], given.float()) and not rows[length:].any()
    assert held == set(range(6))  # every page once


def test_rounded_rows_stand_for_what_was_given():
    x = torch.randn(50, 8, 128) * torch.tensor([1.0, 100.0]).repeat_interleave(4)[:, None]
    by_heads, scale = rounded.by_heads(x, 2)
    by_token = rounded.by_token(x)
    assert scale.shape == (2,) and by_token.scale.shape == (50, 8, 1)
    assert float(by_heads.bits.float().abs().max()) == float(by_token.bits.float().abs().max()) == 448
    for given in (by_heads, by_token):
        off = (given[:] - x).abs() / (
            x.abs() + 448 * given.scale * 2.0**-14
        )  # half a unit in the last of 4 bits, or of a subnormal
        assert float(off.max()) < 2.0**-4 + 1e-3
        assert torch.equal(given[torch.tensor([3, 7])], given[:][[3, 7]])


def test_sage_shares_a_scale_among_the_rows_of_a_thread():
    q, k, v = PROMPT.inputs()
    x = q.transpose(0, 1)[None]  # [1, H, S, D]
    bits, scale, of_rows = sage._by_thread(x, 16, lambda row: row % 8, 8)
    assert scale.shape == (1, 4, 256 // 16 * 8) and int(bits.abs().max()) == 127
    for row in (0, 5, 37):
        assert torch.equal(of_rows[:, :, row // 16 * 16 + row % 8], of_rows[:, :, row // 16 * 16 + row % 8 + 8])
    assert torch.equal(of_rows[0, :, 37, 0], scale[0, :, 37 // 16 * 8 + 5])
    run = sage.attention(PROMPT, q, k, v)
    centered = k.float() - k.float().mean(0)
    for given, exact in zip((run.q, *run.held(0)), (q, centered, v), strict=True):
        assert float((given - exact.float()).norm() / exact.float().norm()) < 0.03
    assert sorted(sage.ORDER) == list(range(16))


def test_comfy_holds_rows_by_threads_and_values_by_channels():
    """The layout of its kernels: a scale for rows 8 apart of 32 in Q, for pairs of rows 8 apart of 128 in K; V's bits
    b3 b2 b1 b0 at b2 b1 b3 b0."""
    batch, heads, length = 2, 3, 130
    q = torch.empty(batch, heads, length, 128)
    held = comfy.Quantized.like(q, q)
    assert held.q_scale.shape == (2, 3, 64) and held.k_scale.shape == (2, 3, 8) and held.v.shape == (2 * 3 * 128, 256)
    for bits in (held.q, held.k, held.v):
        bits.random_(-127, 128)
    for scale in (held.q_scale, held.k_scale, held.v_scale):
        scale.uniform_(1.0, 2.0)
    q, k, v = held.values()
    for b, h, row, channel in ((0, 0, 0, 0), (1, 2, 129, 127), (1, 0, 77, 5), (0, 2, 45, 64)):
        assert q[b, h, row, channel] == held.q[b, h, row, channel] * held.q_scale[b, h, row // 32 * 8 + row % 8]
        assert k[b, h, row, channel] == held.k[b, h, row, channel] * held.k_scale[b, h, row // 128 * 4 + row % 8 // 2]
        line, group, bit = (b * heads + h) * 128 + channel, row // 16 * 16, [row >> i & 1 for i in range(4)]
        at = group + 8 * bit[2] + 4 * bit[1] + 2 * bit[3] + bit[0]
        assert v[b, h, row, channel] == held.v[line, at] * held.v_scale[line]


@pytest.mark.parametrize(
    ("module", "shape", "reason"),
    [
        (hpc_ops, problem.square(128, False, 300), "its mask is causal"),
        (hpc_ops, problem.square(64, True, 300), "head_dim is 128"),
        (hpc_ops, problem.steps(300, queries=4), "one query a sequence"),
        (flashinfer, problem.square(64, True, 300), "head_dim"),
        (flashinfer, problem.steps(300, dim=64), "head_dim 128"),
        (flashinfer, problem.steps(300, group=8), "4 query heads"),
        (fa4, problem.steps(300, dim=512), "compiled for 32 and 4 heads of 512, causal"),
        (sage, problem.square(128, True, 30, 40), "no ragged batches"),
        (comfy, problem.square(128, True, 2000), "full attention, head_dim 128, more than 1024 keys"),
        (comfy, problem.square(64, False, 2000), "full attention, head_dim 128"),
        (comfy, problem.square(128, False, 1024), "more than 1024 keys"),
        (torch_sdpa, Shape((4,), (2,), 2, 2, 64, True), "aligned to the start"),
    ],
)
def test_what_a_peer_cannot_do_is_refused_by_name(module, shape, reason):
    with pytest.raises(ValueError, match=reason):
        next(iter(module.PEER.calls.values())).run(shape, *shape.inputs())


@pytest.mark.parametrize(("batch", "kernels"), [(64, ["fp8_step"]), (2, ["fp8_parts", "combine_32"])])
def test_fa4_divides_long_sequences_of_few_requests(monkeypatch, batch, kernels):
    """As its heuristic: one part for each CTA that is left over. Scales are of each KV head."""
    called = {}
    monkeypatch.setattr(fa4, "_kernel", lambda name: lambda *args: called.update({name: args}))
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    shape = problem.steps(*(1000,) * batch, kv_heads=4, group=8, dim=512)
    assert shape.q_heads == wide.CASES["B64-S8192"].q_heads and shape.dim == wide.CASES["B64-S8192"].dim
    q, k, v = shape.inputs()
    run = fa4.fp8(shape, q, k * 3, v)
    assert run.call().shape == (batch, 32, 512) and list(called) == kernels
    q_given, k_given, _, out, lse, scale = called[kernels[0]][:6]
    assert torch.equal(q_given, q) and scale == 512**-0.5
    used, table, scales = called[kernels[0]][9], called[kernels[0]][11], called[kernels[0]][17]
    stored = k_given[table[1, 0]].float() * scales[1][1][None, :, None]
    assert used.tolist() == [1000] * batch and torch.equal(stored, run.held(1)[0][: pages.SIZE])
    if len(kernels) == 2:
        assert out.shape == (16, 2, 32, 512) and lse.shape == (16, 32, 2)  # 132 SMs for 8 heads, and 16 pages
        assert called["combine_32"][1].shape == (16, 2, 32)


def test_fa3_gets_the_scales_of_its_operands(monkeypatch):
    """A build that attends in float64 to what bytes and scales stand for."""
    given = {}

    def op(**arguments):
        given.clear()
        given.update(arguments)
        return (torch.zeros(len(arguments["q"]), 8, 128),)

    monkeypatch.setattr(flash.builds, "find", lambda name: flash.builds.Build(name, op))
    q, k, v = STEP.inputs()
    k *= 3
    run = peers.CALLS["vllm-fa3-fp8-paged"].run(STEP, q, k, v)
    assert run.call().shape == (3, 8, 128)
    assert (
        given["q"].dtype == given["k"].dtype == FP8
        and given["num_splits"] == 0
        and given["seqused_k"].tolist() == [70, 130, 5]
    )
    assert [given[f"{name}_descale"].shape for name in "qkv"] == [(3, 2)] * 3
    page = int(given["page_table"][2, 0])
    stored = given["k"][page, :5].float() * given["k_descale"][2][None, :, None]
    assert torch.equal(stored, run.held(2)[0])
    assert float((run.held(1)[0] - STEP.split(k)(1)[0]).norm() / k.norm()) < 0.03
    for mixed, splits in (
        (Shape((70, 90), (1, 90), 8, 2, 128, True), 0),
        (problem.square(128, True, 90, q_heads=8, kv_heads=2), 1),
    ):
        vllm_fa3.dense(mixed, *mixed.inputs())()
        assert given["num_splits"] == splits


def test_a_library_is_linked_with_names_alone(monkeypatch, tmp_path):
    """What is not compiled is null, what is needed is named; the first error is the reason."""
    commands = []

    def execute(command, **options):
        commands.append([str(x) for x in command])
        out = {"--undefined-only": "a.o\n_Zwanted U\n_Zneeded U\n_Zelse U\n", "--defined-only": "_Zwanted T 0 1\n"}.get(
            commands[-1][1], ""
        )
        return subprocess.CompletedProcess(command, 0, out, "")

    monkeypatch.setattr(subprocess, "run", execute)
    library = peer.Source("made", "r==1", ("a.cu",), (".",), (), ("torch", "cuda"), missing="_Zneed")
    get_peers.build(library, tmp_path / "source", [tmp_path / "headers"], tmp_path)
    assert any("-Wl,-soname,libcuda.so.1" in command for command in commands)
    assert [x for x in commands[-1] if "defsym" in x] == ["--defsym=_Zneeded=0"] and "-ltorch" in commands[-1]
    assert (tmp_path / "include/torch/extension.h").read_text().startswith("#pragma once")
    monkeypatch.setattr(
        subprocess, "run", lambda *a, **o: subprocess.CompletedProcess(a, 1, "", "note\nx.cu: error: no\nmore")
    )
    with pytest.raises(LookupError, match=r"nvcc: x\.cu: error: no"):
        get_peers.build(library, tmp_path / "source", [], tmp_path)


def test_code_for_other_gpus_is_zero():
    def part(sm: int, code: bytes) -> bytes:
        return struct.pack("<HHIQ12xI", 2, 0, 40, len(code), sm) + bytes(8) + code

    def fatbin(*parts: bytes) -> bytes:
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, parts))) + b"".join(parts)

    before, after = (
        b"host" + fatbin(part(80, other), part(90, b"hopper")) + fatbin(part(80, b"alone")) + b"\x50\xed\x55\xba"
        for other in (b"others", bytes(6))
    )
    assert get_peers.pruned(before) == after


def test_sources_are_checkouts_where_github_is_not_reached(monkeypatch, tmp_path):
    monkeypatch.setenv("FP8ATTN_SOURCES", str(tmp_path))
    monkeypatch.setattr(get_peers, "FOLDER", tmp_path / ".peers")
    monkeypatch.setattr(get_peers, "unpacked", lambda release, work, inside: work)
    with pytest.raises(LookupError, match="holds no hpc-ops"):
        get_peers.compile(hpc_ops.SOURCE, tmp_path)


def test_the_newest_cudnn_is_loaded_whole_or_not_at_all(monkeypatch, tmp_path):
    """The frontend is loaded in any case. A library that is not there leaves torch's own."""
    loaded = []
    monkeypatch.setattr(peer, "FOLDER", tmp_path)
    monkeypatch.setattr(peer, "UNPACKED", tmp_path / "unpacked")
    monkeypatch.setattr(cudnn.ctypes, "CDLL", loaded.append)
    monkeypatch.setattr(cudnn, "import_wheel", lambda module, name: loaded.append(module))
    for count, name in enumerate((*cudnn.LIBRARIES, None)):
        loaded.clear()
        cudnn.load()
        paths = (
            [str(tmp_path / f"unpacked/{each}.so") for each in cudnn.LIBRARIES] if count == len(cudnn.LIBRARIES) else []
        )
        assert loaded == [*paths, "cudnn"]
        if name:
            (tmp_path / f"{name}.so.xz").write_bytes(lzma.compress(b"library"))
