"""The noise of 8-bit weights and values in full attention, by their format, simulated in FP32.

    PYTHONPATH=src:. python -m docs.lab.video      # without a GPU, a minute

Q and K are rotated and rounded to INT8 as Comfy Kitchen does it: a scale for 4 rows of Q and for 32 of K. Weights are rounded in units of
the largest of each tile of 128 keys: to integers up to 255, or to E4M3, whose largest is 448. Sums are of the rounded weights. V has a
scale for each channel: INT8 or E4M3. The relative error is against float64 on the inputs, for 96 queries of one head.
"""

from __future__ import annotations

import torch

from benchmarks.measure import exact, relative
from fp8attn.formats.codec import FP8
from fp8attn.formats.rotation import rotate

TILE, QUERIES, DIM = 128, 96, 128


def int8(x: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """Rows rounded with one scale for those of equal `owner`."""
    largest = torch.zeros(int(owner.max()) + 1).scatter_reduce(0, owner, x.abs().amax(1), "amax")
    scale = (largest / 127)[owner, None]
    return (x / scale).round() * scale


def values(v: torch.Tensor, codec: str) -> torch.Tensor:
    """V rounded with a scale for each channel."""
    scale = v.abs().amax(0) / (127 if codec == "int8" else 448)
    return ((v / scale).round() if codec == "int8" else (v / scale).to(FP8).float()) * scale


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, codec: str) -> torch.Tensor:
    s = q @ k.T * DIM**-0.5
    s = torch.nn.functional.pad(s, (0, -len(k) % TILE), value=-torch.inf).unflatten(1, (-1, TILE))
    largest = s.amax(-1, keepdim=True)
    w = torch.exp(s - largest)
    w = (w * 255).round() / 255 if codec == "int8" else (w * 448).to(FP8).float() / 448
    w = (w * torch.exp(largest - s.amax((1, 2), keepdim=True))).flatten(1)[:, : len(k)]
    return w @ v / w.sum(1, keepdim=True)


def main() -> None:
    for length in (32760, 75600, 118800, 185640):
        for mean in (0.0, 1.0):
            torch.manual_seed(0)
            q, k, v = (torch.randn(n, DIM) for n in (QUERIES, length, length))
            v += mean
            ref = exact(q[:, None], k[:, None], v[:, None], DIM**-0.5)[:, 0]
            row, rows = torch.arange(QUERIES), torch.arange(length)
            q8 = int8(rotate(q), row // 32 * 8 + row % 8)
            k8 = int8(rotate(k), rows // TILE * 4 + rows % 8 // 2)
            off = {codec: relative([(attend(q8, k8, values(v, codec), codec), ref)]) for codec in ("int8", "e4m3")}
            print(f"{length:7,} keys, V of mean {mean:.0f}: " + ", ".join(f"{codec} {x:.2%}" for codec, x in off.items()), flush=True)


if __name__ == "__main__":
    main()
