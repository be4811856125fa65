"""Shows that the error of vLLM's dense FP8 kernel over latents (MLA) depends on the batch. One file, one command:

    python single_level.py [--tokens 131072] [--mean 1] [--heads 128]

It needs a Hopper GPU, torch, and an installed vLLM (measured with 0.26), whose libraries it loads; nothing else of vLLM
is imported. All requests of a batch have the same pages, so 1 GB of GPU memory is enough. Each line is one call of the
kernel that `--kv-cache-dtype fp8` runs, and one of the BF16 kernel beside it; only the number of requests differs. The
error of the first request is against float64 on the very bytes that the kernel was given, so no rounding of the cache
is in it.

`emulated` is what the tensor core's rule for FP8 sums predicts: an instruction adds 32 products to the sum so far, and
cuts off each of these 33 numbers what is below 2^-13 of the largest one's power of two. This column, and the errors of
sums that go to FP32 every so many tokens, need no GPU; without one they are all that is printed, in three minutes of a
core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

RANK, ROPE, PAGE, SCALE = 512, 64, 64, 192**-0.5
ROWS = 64  # of queries and heads, which a block of the kernel has
BATCHES = (1, 2, 8, 22, 66)
SMS = 132  # of an H200: as many blocks run
PROMOTED = (64, 256, 1024, 4096)  # tokens
KEPT = 13  # bits below the largest number's power of two
EMULATED = 2  # heads

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def load(folder: Path) -> None:
    """Load the two libraries of kernels of vLLM's package in `folder`."""
    for name in ("_flashmla_C", "_flashmla_extension_C"):
        torch.ops.load_library(folder / f"{name}.abi3.so")


def bf16(q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """FlashMLA in 16 bits: `q [batch, 1, heads, 576]`, `cache [pages, 64, 1, 576]`. `[batch, 1, heads, 512]`."""
    call = torch.ops._flashmla_C.dense_decode_fwd
    return call(q.bfloat16(), cache.bfloat16(), RANK, lengths, table, SCALE, True, None, None, None)[0]


def fp8(q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The FP8 kernel, with scales of one."""
    ops, one = torch.ops._flashmla_extension_C, torch.ones(1, device=q.device)
    plan = ops.get_mla_decoding_metadata_dense_fp8(lengths, q.shape[1] * q.shape[2], 1)
    return ops.fwd_kvcache_mla_fp8(q, cache, RANK, lengths, table, SCALE, True, *plan, one, one)[0]


def inputs(tokens: int, heads: int, mean: float, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A query `[heads, 576]` and latents with keys `[tokens, 576]`, random, in E4M3. Every channel of the latents has
    this mean and a deviation of one.
    """
    generator = torch.Generator(device).manual_seed(0)
    q = 0.3 * torch.randn(heads, RANK + ROPE, device=device, generator=generator)
    rows = torch.randn(tokens, RANK + ROPE, device=device, generator=generator)
    rows[:, :RANK] += mean
    return q.to(torch.float8_e4m3fn), rows.to(torch.float8_e4m3fn)


def exact(q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Attention in float64, `[heads, 512]`."""
    rows = rows.double()
    return torch.softmax(q.double() @ rows.T * SCALE, 1) @ rows[:, :RANK]


def emulated(q: torch.Tensor, rows: torch.Tensor, scale: float, parts: int) -> torch.Tensor:
    """Attention of queries `[heads, rank + rope]` over `rows [tokens, rank + rope]`, both in E4M3, which are summed in
    so many parts: each wholly in the tensor core, and the parts in FP32. Weights are in E4M3, the largest is 256.
    Returns `[heads, rank]` float32.
    """
    outs, lses = [], []
    for part in rows.float().tensor_split(min(parts, len(rows))):
        scores = q.float() @ part.T * scale
        top = scores.amax(1, keepdim=True)
        weights = 256 * torch.exp(scores - top)
        products = weights.to(torch.float8_e4m3fn).float()[..., None] * part[:, :RANK]
        total = torch.zeros_like(products[:, 0])
        for group in products.split(32, 1):
            total = cut(torch.cat([total[:, None], group], 1)).sum(1)
        outs.append(total / weights.sum(1, keepdim=True))
        lses.append(top + weights.sum(1, keepdim=True).log())
    return (torch.softmax(torch.stack(lses), 0) * torch.stack(outs)).sum(0)


def cut(x: torch.Tensor) -> torch.Tensor:
    """Numbers `[heads, n, rank]` that one instruction adds, without the bits that it drops."""
    unit = torch.exp2(torch.frexp(x.abs().amax(1, keepdim=True)).exponent.float() - 1 - KEPT)
    return (x / unit).trunc() * unit


def emulated_error(q: torch.Tensor, rows: torch.Tensor, parts: int, want: torch.Tensor) -> float:
    """The relative error of some heads."""
    out, want = emulated(q[:EMULATED], rows, SCALE, parts).double(), want[:EMULATED]
    return float((out - want).norm() / want.norm())


def error(attend: Attend, q: torch.Tensor, rows: torch.Tensor, batch: int, want: torch.Tensor) -> float:
    """The relative error of the first of `batch` equal requests."""
    pages = -(-len(rows) // PAGE)
    cache = torch.zeros(pages * PAGE, rows.shape[1], dtype=torch.uint8, device=q.device)
    cache[: len(rows)] = rows.view(torch.uint8)
    cache = cache.view(rows.dtype).view(pages, PAGE, 1, -1)
    lengths = torch.full((batch,), len(rows), dtype=torch.int32, device=q.device)
    table = torch.arange(pages, dtype=torch.int32, device=q.device).repeat(batch, 1)
    queries = q.view(torch.uint8).expand(batch, 1, -1, -1).contiguous().view(q.dtype)
    out = attend(queries, cache, lengths, table)[0, 0].double()
    return float((out - want).norm() / want.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072, help="of a request (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=128, help="query heads (default: %(default)s)")
    parser.add_argument("--mean", type=float, default=1.0, help="of each channel, in deviations (default: %(default)s)")
    parser.add_argument("--vllm", type=Path, help="the folder of vLLM's package (default: the installed one's)")
    args = parser.parse_args()
    measured = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    sms, device = SMS, "cpu"
    if measured:
        spec = find_spec("vllm")
        if args.vllm is None and (spec is None or spec.origin is None):
            sys.exit("vLLM is not installed here: pip install vllm, or name the folder of its package with --vllm")
        load(args.vllm or Path(spec.origin).parent)
        sms, device = torch.cuda.get_device_properties(0).multi_processor_count, "cuda"
    where = torch.cuda.get_device_name() if measured else "no Hopper GPU, so nothing is measured"
    print(f"{where}; torch {torch.__version__}; {args.tokens:,} tokens, {args.heads} heads, mean {args.mean:g}\n")
    q, rows = inputs(args.tokens, args.heads, args.mean, device)
    want = exact(q, rows)
    print("requests  blocks a request  emulated" + "  FP8 kernel  BF16 kernel" * measured)
    for batch in BATCHES:
        blocks = max(1.0, sms / (batch * -(-args.heads // ROWS)))
        line = f"{batch:8d}  {blocks:16.1f}  {emulated_error(q, rows, round(blocks), want):8.1%}"
        if measured:
            off = [error(attend, q, rows, batch, want) for attend in (fp8, bf16)]
            line += f"  {off[0]:10.1%}  {off[1]:11.2%}"
        print(line, flush=True)
    print("\nto FP32 every  emulated")
    for tokens in PROMOTED:
        parts = -(-args.tokens // tokens)
        print(f"{tokens:6d} tokens  {emulated_error(q, rows, parts, want):8.2%}", flush=True)


if __name__ == "__main__":
    main()
