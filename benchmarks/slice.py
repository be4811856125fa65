"""The portable Triton kernel beside torch's BF16 attention, prefill and decode, each checked before it is timed.

    PYTHONPATH=src python -m benchmarks.slice [case substring ...] [--save]
    PYTHONPATH=src python -m benchmarks.slice --tune [case substring ...]    (times other launch configurations)

One process, implementations interleaved, medians, random data and page tables, CUDA graphs where a host could be the slower one, the L2
cache flushed before every run. `gbps` counts the live bytes of K and V. `rel_err` is against float64 on the bytes that each
implementation was given, BF16's own rounding of the output (1.7e-3) included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fp8attn import KVPages
from fp8attn.kernels import append, portable
from fp8attn.layout import PAGE_SIZE
from fp8attn.numerics import relative_error

from . import results
from .fingerprint import launched, peer
from .measure import exact, graph_of, interleaved
from .problem import DEVICE

OURS = "fp8attn-triton"
KERNEL_ERROR = 3e-4
ROUNDS = 40
CHECKED = 32  # queries of a sequence that are compared with float64
PEERS = {"sdpa-flash-bf16": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn-bf16": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    length: int
    q_heads: int
    kv_heads: int
    dim: int
    queries: int
    causal: bool = True

    @property
    def kv_elements(self) -> int:
        return 2 * self.batch * self.length * self.kv_heads * self.dim

    @property
    def flops(self) -> float:
        return 4 * self.batch * self.q_heads * self.length**2 * self.dim / (2 if self.causal else 1)


def decode(batch: int, length: int) -> Case:
    return Case(f"kernel-decode-B{batch}-S{length}", batch, length, 32, 8, 128, 1)


def prefill(dim: int, length: int, batch: int = 1, causal: bool = True) -> Case:
    heads = 2048 // dim
    name = f"kernel-prefill-D{dim}-{'causal' if causal else 'full'}-S{length}-B{batch}"
    return Case(name, batch, length, heads, heads, dim, length, causal)


_CASES = (
    decode(1, 8192), decode(8, 32768), decode(16, 8192), decode(64, 8192),
    prefill(128, 4096, 4), prefill(128, 16384), prefill(128, 16384, causal=False), prefill(64, 16384), prefill(256, 16384),
)  # fmt: skip
CASES = {case.name: case for case in _CASES}


# What they are given, and what is right


def tokens(batch: int, length: int, heads: int, dim: int) -> torch.Tensor:
    return torch.randn(batch, length, heads, dim, device=DEVICE, dtype=torch.bfloat16)


def make_pages(batch: int, length: int, heads: int, dim: int) -> KVPages:
    """No tokens yet, and shuffled pages."""
    columns = -(-length // PAGE_SIZE)
    pages = KVPages.empty(batch * columns, heads, dim, batch, columns, DEVICE)
    pages.page_table.copy_(torch.randperm(batch * columns, device=DEVICE).view(batch, columns))
    return pages


def append_options(length: int, cos=None, sin=None) -> dict:
    rope = {"rope_cos": cos, "rope_sin": sin, "rope_interleaved": False}
    return {"cu_seqlens": None, "max_seqlen": length, "static_scales": False} | rope


def attention_options(case: Case, queries: int) -> dict:
    none = {"window": 0, "softcap": 0.0, "sinks": None, "leftpad_k": None}
    return {"cu_seqlens_q": None, "max_seqlen_q": queries, "causal": case.causal, "softmax_scale": case.dim**-0.5} | none


def check(name: str, out: torch.Tensor, ref: torch.Tensor, limit: float) -> float:
    error, rounding = relative_error(out, ref), relative_error(ref.to(out.dtype), ref)
    assert error**2 <= limit**2 + rounding**2, f"{name}: error {error:.2e}, of which rounding {rounding:.2e}"
    return error


def peers(case: Case, q, k, v) -> dict[str, Callable]:
    """torch's SDPA by backend; those that this build or GPU does not have are left out."""
    views = [x.transpose(1, 2) for x in (q, k, v)]
    found = {}
    for name, backend in PEERS.items():

        def run(backend=backend):
            with sdpa_kernel(backend):
                # Decode is causal with nothing to mask; torch aligns its mask at the start.
                return scaled_dot_product_attention(
                    *views, is_causal=case.causal and case.queries > 1, enable_gqa=case.q_heads != case.kv_heads
                )

        try:
            run()
            found[name] = run
        except RuntimeError as error:
            print(f"{case.name}: without {name}: {str(error).splitlines()[0]}", flush=True)
    return found


def prepare(case: Case):
    q = tokens(case.batch, case.queries, case.q_heads, case.dim)
    k, v = (tokens(case.batch, case.length, case.kv_heads, case.dim) for _ in "kv")
    pages = make_pages(case.batch, case.length, case.kv_heads, case.dim)
    append.append(pages, k.flatten(0, 1), v.flatten(0, 1), **append_options(case.length))
    pages.cache_seqlens.fill_(case.length)
    return q, k, v, pages, lambda: portable.attention(q.flatten(0, 1), pages, **attention_options(case, case.queries))[0]


def calls(name: str) -> dict[str, Callable]:
    """Our implementation of a case."""
    return {OURS: prepare(CASES[name])[-1]}


def attention_rows(case: Case) -> list[dict]:
    q, k, v, pages, ours = prepare(case)
    runs = {OURS: ours} | peers(case, q, k, v)
    prints = {name: launched(run) if name == OURS else peer(name) for name, run in runs.items()}
    rows = q.shape[1] - torch.arange(min(CHECKED, q.shape[1]), device=DEVICE).flip(0) - 1
    last_key = rows + case.length - q.shape[1] if case.causal else None
    errors = {}
    for name, run in runs.items():
        paged = name == OURS
        out = run().view(q.shape) if paged else run().transpose(1, 2)
        held = {seq: pages.read(seq, case.length, torch.float64) if paged else (k[seq], v[seq]) for seq in (0, case.batch - 1)}
        pairs = [(out[seq, rows], exact(q[seq, rows], *held[seq], case.dim**-0.5, last_key)) for seq in held]
        # torch rounds its weights to BF16, ours to FP16.
        limit = KERNEL_ERROR if name == OURS else 1e-2
        errors[name] = max(check(f"{case.name} {name}", *pair, limit) for pair in pairs)
    if case.queries == 1:
        runs = {name: graph_of(run)[0] for name, run in runs.items()}
    rows = []
    for name, ms in interleaved(runs, ROUNDS, flush=True).items():
        row = {"case": case.name, "impl": name, "ms": round(ms, 5)}
        if case.queries == 1:
            row["gbps"] = round(case.kv_elements * (1 if name == OURS else 2) / ms / 1e6)
        else:
            row["tflops"] = round(case.flops / ms / 1e9, 1)
        rows.append(row | {"rel_err": errors[name], "fingerprint": prints[name]})
    return rows


# Other configurations

FEW = [(16, 128, 4, 4, s) for s in (2, 3, 4)] + [(16, 128, 1, 4, 3), (16, 64, 1, 4, 4)]
MANY = [
    (128, 64, 1, 8, 2),
    (128, 64, 1, 8, 3),
    (128, 128, 1, 8, 2),
    (128, 32, 1, 8, 3),
    (64, 64, 1, 4, 2),
    (64, 64, 1, 4, 3),
    (64, 128, 1, 4, 2),
]


def tune(case: Case) -> None:
    """Print the time of each configuration (rows, tile, key_warps, num_warps, num_stages)."""
    _, _, _, _, ours = prepare(case)
    configurations = FEW if case.queries == 1 else MANY
    chosen = portable.config
    default = chosen(case.dim, case.queries * case.q_heads // case.kv_heads, portable._device(torch.device("cuda", 0))[1])
    for configuration in configurations:
        portable.config = lambda *_, c=configuration: portable.Config(*c)
        try:
            ms = interleaved({"": graph_of(ours)[0] if case.queries == 1 else ours}, ROUNDS, flush=True)[""]
        except RuntimeError as error:  # too much shared memory
            print(f"{case.name} {configuration}: {str(error).splitlines()[0]}", flush=True)
            continue
        rate = f"{case.kv_elements / ms / 1e6:.0f} GB/s" if case.queries == 1 else f"{case.flops / ms / 1e9:.0f} TFLOPS"
        print(f"{case.name} {configuration}: {ms:.4f} ms {rate}{'  <- chosen' if configuration == tuple(default) else ''}", flush=True)
    portable.config = chosen


def main() -> None:
    parser = results.arguments(__doc__)
    parser.add_argument("--tune", action="store_true", help="time other launch configurations instead, and keep nothing")
    args = results.parse(parser)
    torch.manual_seed(0)
    rows = []
    for name in results.chosen(CASES, args.cases):
        if args.tune:
            tune(CASES[name])
            continue
        rows += (found := attention_rows(CASES[name]))
        print(*found, sep="\n", flush=True)
    if args.save and rows:
        results.save("slice", rows)


if __name__ == "__main__":
    main()
