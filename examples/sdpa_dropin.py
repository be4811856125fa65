"""8-bit attention instead of PyTorch's `scaled_dot_product_attention`, in a call of your own and in a whole model.

With small tensors (on a GPU or a CPU), and with so many tokens that 8 bits are faster than BF16 on a GPU:

    python examples/sdpa_dropin.py
    python examples/sdpa_dropin.py --tokens 32768
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import fp8attn

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", type=int, default=512)
args = parser.parse_args()

gpu = torch.cuda.is_available()
where = {"device": "cuda" if gpu else "cpu", "dtype": torch.bfloat16 if gpu else torch.float32}
torch.manual_seed(0)


def distance(x: torch.Tensor, exact: torch.Tensor) -> str:
    return f"{((x - exact).norm() / exact.norm()).item():.2%}"


# One call: the same arguments and meaning as torch's function.
q, k, v = (torch.randn(1, heads, args.tokens, 128, **where) for heads in (16, 4, 4))
options = {"is_causal": True, "enable_gqa": True}
out = fp8attn.scaled_dot_product_attention(q, k, v, **options)
print("one call differs from torch's by", distance(out, F.scaled_dot_product_attention(q, k, v, **options)))

# A call that 8 bits cannot serve runs torch's function. `fallback_reason` says why.
mask = torch.ones(args.tokens, args.tokens, dtype=torch.bool, device=where["device"])
print("with a mask, torch's function runs:", fp8attn.fallback_reason(q, k, v, attn_mask=mask))


# A whole model, without a change to its code.
class Block(nn.Module):
    """Self-attention with a residual connection; `x` is `[B, S, size]`."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(256, heads=4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


model = Model().to(**where)
x = torch.randn(1, args.tokens, 256, **where)

# The first layer stays in 16 bits. By default calls of fewer than 4,608 tokens do, too.
policy = fp8attn.AttentionPolicy(skip_first=1, min_length=256)
with torch.inference_mode():
    exact = model(x)
    with fp8attn.fp8_attention(policy, model) as report:
        out = model(x)
print("the model's output differs by", distance(out, exact))
print(report)
