"""Makes dry calls of a layer for all lengths to 300 and some beyond, and prints as JSON which of their kernels `warmup`
does not list.

A process of its own (`test_calls.py` runs it), because plans for the device "meta" are kept for one machine.

    python -m tests.precompile.run_lengths [SHAPE ...]
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial

from fp8attn.kernels.compile import specialization
from fp8attn.kernels.launch import recording
from fp8attn.kernels.machine import plan_for
from fp8attn.precompile import calls, first
from fp8attn.precompile.calls import Layer
from tests.support.machines import TARGETS

SHAPES = {"llama": (32, 8, 128), "qwen": (12, 2, 128), "mha": (24, 24, 128), "d64": (12, 12, 64)}
MOST = 1 << 18  # queries of a dense call
SAMPLES = 200  # lengths from 257 to 131,072


def sampled(layer: Layer) -> Iterator[tuple[str, Callable[[], None]]]:
    """Prompts whole and in chunks, appends, and dense calls with as many keys as queries, with other numbers of keys,
    and with few.
    """
    draw = random.Random(0)
    lengths = {*range(1, 301), *(int(2 ** draw.uniform(8, 17)) for _ in range(SAMPLES))}
    for tokens in sorted(lengths):
        held = draw.choice((0, 0, 1, 7, 100, 1000))
        yield f"{tokens} tokens after {held} pages", partial(calls.attend, layer, 1, tokens, held)
        yield f"append of {tokens}", partial(calls.append, layer, tokens, False)
        yield f"quantization of {tokens}", partial(calls.from_dense, layer, tokens)
        for batch in {1, draw.choice((2, 3, 5, 16))}:
            if batch * tokens <= MOST:
                for causal in (True, False):
                    yield (
                        f"dense, {batch} x {tokens}, causal {causal}",
                        partial(calls.attend_new, layer, batch, tokens, causal),
                    )
                for keys in (int(2 ** draw.uniform(0, 17)), 77):
                    yield (
                        f"dense, {batch} x {tokens}, {keys} keys",
                        partial(calls.attend_new, layer, batch, tokens, False, keys),
                    )


def main() -> None:
    plan_for(TARGETS["sm_90"])
    found = {}
    for name in sys.argv[1:] or SHAPES:
        layer = Layer(*SHAPES[name])
        known, missing, count = first.record(calls.calls_of(layer)), {}, 0
        for said, call in sampled(layer):
            with recording(dry=True) as made:
                call()
            count += len(made)
            for launch in made:
                if (key := specialization(launch)) not in known:
                    missing.setdefault(key, f"{launch.kernel.fn.__name__}: {said}")
        found[name] = {"launches": count, "missing": list(missing.values())}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
