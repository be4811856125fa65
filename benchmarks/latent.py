"""A decode step's attention over latents (MLA), compared with its peers.

Each implementation (`peers/flashmla.py` has the others) runs as a CUDA graph; the L2 cache
is flushed before every run. Ours rounds its queries and combines its parts in the timed call. Latents are random, of
mean 1 in every channel when they are timed, 512 channels and 64 with RoPE, in shuffled pages between poison. `rel_err`
is against float64 on the bytes that each implementation was given, on the first and the last sequence; `rel_err_0` and
`rel_err_0.3` with latents of these means. `tflops` counts `2 * (576 + 512)` for each query row and visible token;
`gbps` counts a token's 644 bytes, 1,152 of BF16 and 576 of E4M3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fp8attn import AttentionParams, KVPages
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.formats.rotation import rotate, rotate_back
from fp8attn.formats.spec import PageSpec
from fp8attn.kernels.latent import hopper

from . import peers
from .decode import ragged
from .measure import checked, interleaved, relative, sampled_queries
from .problem import DEVICE, K, Run, Shape, offsets, steps

RANK, ROPE = 512, 64
TOKEN = RANK + 2 * ROPE + 4  # bytes
BYTES = {"flashmla-bf16": 2 * (RANK + ROPE), "vllm-flashmla-fp8": RANK + ROPE}  # of a token
QUERY = 0.3  # the standard deviation of queries
SCALE = 192**-0.5
MEANS = (1.0, 0.0, 0.3)  # of latents; the first is timed
CHUNK = 1 << 18  # tokens that are rounded at a time
# Of ours, relative: BF16's rounding of the output, 0.0017, and digits of queries and weights.
MOST_ERROR = {True: 0.003, False: 0.02}  # up to 32 heads; with more


class LatentShape(Shape):
    """`Shape` of latents: `dim` is 576, and there is one KV head."""

    @property
    def softmax_scale(self) -> float:
        return SCALE

    @property
    def flops(self) -> float:
        return super().flops * (2 * RANK + ROPE) / (2 * (RANK + ROPE))


def case(heads: int, *lengths: int, queries: int = 1) -> LatentShape:
    plain = steps(*lengths, kv_heads=1, group=heads, dim=RANK + ROPE, queries=queries)
    return LatentShape(plain.keys, plain.queries, plain.q_heads, 1, plain.dim, True)


EVEN = (
    (128, 64, 8), (128, 8, 64), (128, 1, 128), (128, 1, 8), (128, 66, 8), (128, 66, 128), (64, 32, 8), (64, 128, 4),
    (64, 128, 8), (32, 64, 8), (20, 32, 8), (16, 32, 8), (16, 128, 4), (16, 128, 8), (16, 256, 4), (16, 1, 128),
    (16, 1, 8), (16, 16, 8), (128, 16, 8), (16, 1, 1), (128, 1, 1), (128, 256, 1),
)  # fmt: skip
CASES = {
    **{f"H{h}-B{b}-S{s * K}": case(h, *(s * K,) * b) for h, b, s in EVEN},
    **{f"H{h}-B{b}-S{s * K}-q{q}": case(h, *(s * K,) * b, queries=q)
       for h, b, s, q in ((128, 64, 4, 2), (16, 64, 8, 2), (16, 64, 8, 4))},
    **{f"H{h}-B{b}-S{s * K}-ragged": case(h, *ragged(b, s * K)) for h, b, s in ((128, 64, 8), (16, 64, 8))},
}  # fmt: skip


def inputs(shape: Shape, mean: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Q `[T, heads, 576]`, and latents with their keys `[tokens, 1, 576]`, BF16."""
    torch.manual_seed(0)
    q = (torch.randn(sum(shape.queries), shape.q_heads, shape.dim, device=DEVICE) * QUERY).bfloat16()
    rows = torch.empty(sum(shape.keys), 1, shape.dim, dtype=torch.bfloat16, device=DEVICE)
    rows.normal_()
    rows[..., :RANK] += mean
    return q, rows


def ours(shape: Shape, q: torch.Tensor, rows: torch.Tensor) -> Run:
    """Our kernels over shuffled pages. Bytes that they must not read are NaN."""
    counts = [-(-n // PAGE_SIZE) for n in shape.keys]
    order = torch.randperm(sum(counts) + 1, device=DEVICE)
    pool = torch.full((sum(counts) + 1, 1, PAGE_SIZE * TOKEN), 0xFF, dtype=torch.uint8, device=DEVICE)
    table = order[-1].int().repeat(len(counts), max(counts))
    first = 0
    for seq, (count, length) in enumerate(zip(counts, shape.keys, strict=True)):
        pages = order[sum(counts[:seq]) : sum(counts[:seq]) + count]
        table[seq, :count] = pages
        for page in range(0, count, CHUNK // PAGE_SIZE):
            ids = pages[page : page + CHUNK // PAGE_SIZE]
            tokens = rows[first + page * PAGE_SIZE : first + min(length, (page + len(ids)) * PAGE_SIZE), 0].float()
            x = rotate(tokens[:, :RANK])
            scales = x.abs().amax(1) / 127
            parts = (x / scales[:, None]).round().to(torch.int8), tokens[:, RANK:].half(), scales
            for part, size, at in zip(parts, (RANK, 2 * ROPE, 4), (0, RANK, RANK + 2 * ROPE), strict=True):
                raw = torch.full((len(ids) * PAGE_SIZE, size), 0xFF, dtype=torch.uint8, device=DEVICE)
                raw[: len(tokens)] = part.contiguous().view(torch.uint8).view(-1, size)
                pool[ids, 0, PAGE_SIZE * at : PAGE_SIZE * (at + size)] = raw.view(len(ids), -1)
        first += length
    lengths = torch.tensor(shape.keys, dtype=torch.int32, device=DEVICE)

    def held(seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        n = shape.keys[seq]
        found = pool[table[seq, : -(-n // PAGE_SIZE)].long(), 0].split(
            [PAGE_SIZE * RANK, PAGE_SIZE * 2 * ROPE, PAGE_SIZE * 4], 1
        )
        codes, rope, scales = (
            x.contiguous().view(dtype).view(-1, size)[:n].double()
            for x, dtype, size in zip(found, (torch.int8, torch.float16, torch.float32), (RANK, ROPE, 1), strict=True)
        )
        latents = rotate_back(codes * scales)
        return torch.cat([latents, rope], 1)[:, None], latents[:, None]

    equal = len(set(shape.queries)) == 1
    params = AttentionParams(None if equal else offsets(shape.queries), max(shape.queries), True, SCALE)
    pages = KVPages(pool, table, lengths, KVFormat.of(PageSpec.latent(RANK, ROPE), "int8", True))
    return Run(lambda: hopper.latent_decode(q, pages, params)[0], q, held)


def calls(case: str) -> dict[str, Callable]:
    """Compiled ahead: pages without memory, so nothing is written to them."""
    shape = CASES[case]
    return {"fp8attn": ours(shape, *inputs(shape, MEANS[0])).call}


def error(shape: Shape, out: torch.Tensor, run: Run) -> float:
    """`measure.error`, whose outputs have as many channels as keys; here they have those of the latents."""
    pairs = []
    for seq in sorted({0, len(shape.keys) - 1}):
        index = torch.tensor(sampled_queries(shape.queries[seq]), device=out.device, dtype=torch.long)
        rows = index + shape.rows(seq).start
        k, v = (x[:, 0].double() for x in run.held(seq))
        s = run.q[rows].double() @ k.T * SCALE  # [n, heads, length]
        last = shape.last_key(seq, index)
        if last is not None:
            s.masked_fill_((torch.arange(len(k), device=k.device) > last[:, None])[:, None], -torch.inf)
        pairs.append((out[rows].double(), torch.softmax(s, -1) @ v))
    return relative(pairs)


def runs(shape: Shape, mean: float) -> dict[str, Run]:
    q, rows = inputs(shape, mean)
    theirs = peers.runs(shape, q, rows, rows[..., :RANK], BYTES) if shape.uniform else {}
    return {"fp8attn": ours(shape, q, rows)} | theirs


def measure(case: str) -> Iterator[dict]:
    shape = CASES[case]
    most = MOST_ERROR[shape.q_heads <= 32]
    errors: dict[str, dict] = {}
    for mean in MEANS[1:]:
        for impl, run in runs(shape, mean).items():
            off = round(error(shape, run.call(), run), 6)
            if impl == "fp8attn" and not off <= most:
                raise AssertionError(f"{case}: {impl} is wrong, {off} at mean {mean}")
            errors.setdefault(impl, {})[f"rel_err_{mean:g}"] = off
        torch.cuda.empty_cache()
    timed = runs(shape, MEANS[0])  # a graph does not hold what it reads
    rows, replays = checked(case, timed, most, lambda run, out: {"rel_err": round(error(shape, out, run), 6)})
    for impl, ms in interleaved(replays, 40, flush=True).items():
        speed = {
            "tflops": round(shape.flops / ms * 1e-9, 1),
            "gbps": round(sum(shape.keys) * BYTES.get(impl, TOKEN) / ms * 1e-6, 1),
        }
        yield rows[impl] | errors.get(impl, {}) | {"ms": round(ms, 5)} | speed
