"""Short prompts through `scaled_dot_product_attention` beside BF16, timed in four ways: what a user sees depends on the way.

    PYTHONPATH=src:. python docs/lab/short_prompts.py FILE    # on a Hopper GPU, with .peers; half a minute

Batch 1, 32 query heads and 8 or 32 KV heads of 128, causal, `[1, H, S, 128]` contiguous BF16. *one*: a CUDA graph of one call, replayed.
*twenty*: a graph of 20 calls. *cold*: a graph of one call after a write of 256 MB, which is not timed. *eager*: calls from Python.
Medians in microseconds.
"""

import json
import statistics
import sys
from pathlib import Path

import torch

import fp8attn
from benchmarks import peers
from benchmarks.measure import graph_of
from benchmarks.problem import square

CALLS, SAMPLES = 20, 30


def timed(call, before=None, per=1):
    """The median time of a call in microseconds; `before` is not timed."""
    times = []
    for _ in range(SAMPLES):
        if before is not None:
            before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / per)
    return statistics.median(times)


def repeated(call, count=CALLS):
    for _ in range(count):
        call()


@torch.inference_mode()
def main(path):
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for kv_heads in (8, 32):
        for tokens in (1024, 2048, 4096):
            shape = square(128, True, tokens, q_heads=32, kv_heads=kv_heads)
            q, k, v = (x[None].transpose(1, 2).contiguous() for x in shape.inputs())
            exact = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True)
            calls = {"fp8attn": lambda: fp8attn.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)}  # noqa: B023
            calls |= {"torch": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)}  # noqa: B023
            calls |= {
                impl: run.call
                for impl, run in peers.runs(shape, *(x[0].transpose(0, 1) for x in (q, k, v)), ("fa3-bf16", "cudnn-bf16")).items()
            }
            graphs = {}
            for impl, call in calls.items():
                out = call()
                out = out if out.dim() == 4 else out.transpose(0, 1)[None]
                error = float((out.float() - exact).norm() / exact.norm())
                assert error < 0.06, (impl, error)
                graphs[impl] = graph_of(call)[0], graph_of(lambda call=call: repeated(call))[0]
            for impl, call in calls.items():
                one, twenty = graphs[impl]
                found = {
                    "one": timed(lambda: repeated(one), per=CALLS), "twenty": timed(twenty, per=CALLS), "cold": timed(one, flush.zero_),  # noqa: B023
                    "eager": timed(lambda: repeated(call), per=CALLS),  # noqa: B023
                }  # fmt: skip
                row = {"kv_heads": kv_heads, "tokens": tokens, "impl": impl, **{name: round(us, 2) for name, us in found.items()}}
                with Path(path).open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
