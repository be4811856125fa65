"""FP8 in a whole model on a GPU: eager, compiled by Inductor into CUDA graphs, and compiled by blocks, with equal
results.
"""

import pytest
import torch
from torch import nn

from fp8attn import AttentionPolicy, fp8_attention
from fp8attn.numerics import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(512, 3 * 512)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 4, 128)).permute(2, 0, 3, 1, 4)
        return x + torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@torch.inference_mode()
def test_a_schedule_runs_alike_however_the_model_is_compiled():
    torch.manual_seed(0)
    with torch.device("cuda"):
        net, x = Net().bfloat16().eval(), torch.randn(2, 1500, 512).bfloat16()

    def steps(model):
        outs = []
        with fp8_attention(AttentionPolicy(min_length=1, skip_first=1, skip_last=1, steps={1, 2}), model) as report:
            for _ in range(3):
                outs.append(model(x).clone())
                report.step()
        return outs, report

    plain = net(x)
    eager, report = steps(net)
    assert report.calls == 15 and report.fp8_calls == 6
    assert (
        torch.equal(eager[0], plain) and torch.equal(eager[1], eager[2]) and 0 < relative_error(eager[1], plain) < 0.02
    )
    whole = torch.compile(net, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):  # warm-up, capture, replay
        for out, expected in zip(steps(whole)[0], eager, strict=True):
            torch.testing.assert_close(out, expected)
    torch.testing.assert_close(whole(x), plain)
    torch._dynamo.reset()
    for block in net.blocks:
        block.compile(fullgraph=True)
    for out, expected in zip(steps(net)[0], eager, strict=True):
        torch.testing.assert_close(out, expected)
    torch._dynamo.reset()
