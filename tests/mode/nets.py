"""A small model with attention in blocks, and inputs."""

import torch
from torch import nn

from fp8attn.mode import AttentionPolicy

ANY = AttentionPolicy(min_length=1)
FP8_ERROR = 0.04  # of attention: rounding to FP8 moves V by 2.6%, and K likewise


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(128, 384)

    def forward(self, x, mask=None):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return x + self.attention(x)


class Net(nn.Module):
    def __init__(self, layers=5):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def ran(report):
    """The layers, by where they ran."""
    return {
        "fp8": [row.layer for row in report.rows if row.reason is None],
        "torch": {row.layer: row.reason for row in report.rows if row.reason is not None},
    }


def qkv(length=40, heads=2):
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(1, heads, length, 64, generator=generator) for _ in range(3))
