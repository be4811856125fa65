"""The work of the host in an eager decode step: bookkeeping once, and little Python in each layer."""

import sys
from pathlib import Path

import torch

import fp8attn
from fp8attn import reference
from fp8attn.backends.reference import Reference
from fp8attn.cache.page_table import PageTable
from fp8attn.integrations.transformers import FP8Cache, fp8_kv_attention
from tests.support.transformers_models import make

LAYERS = 8
OURS = Path(fp8attn.__file__).parent


def step(cache, module, x, q):
    for layer in range(LAYERS):
        fp8_kv_attention(module, q, *cache.update(x, x, layer), None, scaling=0.1, position_ids=None, use_cache=True)


def called(function) -> int:
    """The number of Python functions of fp8attn that a call of `function` calls on a GPU: without those that a kernel
    calls, and without the checks of values, which only a CPU makes."""
    count = inside = 0

    def note(frame, event, argument):
        nonlocal count, inside
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(str(OURS)):
            return
        if path.endswith("reference.py") or (
            path.endswith("contents.py") and frame.f_code.co_name.startswith("check_")
        ):
            inside += 1 if event == "call" else -1
        elif event == "call" and not inside:
            count += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@torch.no_grad()
def test_the_way_of_k_to_the_kernel_and_back(monkeypatch):
    """From a model's call to the backend, by the functions that docs/architecture.md names."""
    ways = []
    for name in ("append", "attention"):
        method = getattr(reference, name)

        def noted(*args, method=method, **options):
            frames, frame = [], sys._getframe(1)
            while frame is not None:
                if frame.f_code.co_filename.startswith(str(OURS)):
                    frames.append(frame.f_code.co_qualname)
                frame = frame.f_back
            ways.append(frames[::-1])
            return method(*args, **options)

        monkeypatch.setattr(reference, name, noted)
    monkeypatch.setattr(Reference, "append", staticmethod(reference.append))
    cache, x, q = FP8Cache(make(num_hidden_layers=LAYERS)), torch.randn(2, 2, 1, 64), torch.randn(2, 4, 1, 64)
    step(cache, torch.nn.Module().eval(), x, q)
    ways.clear()
    step(cache, torch.nn.Module().eval(), x, q)
    assert ways == LAYERS * [
        ["FP8Cache.update", "FP8Layer.update", "PagedKVCache.append", "run_append"],
        ["fp8_kv_attention", "_attend_pages", "run_attention", "Reference.attention", "attend_tokens"],
    ]


@torch.no_grad()
def test_a_step_keeps_its_accounts_once_for_all_layers(monkeypatch):
    module, calls = torch.nn.Module().eval(), []
    for name in ("reserve", "advance", "to_device"):
        method = getattr(PageTable, name)
        monkeypatch.setattr(
            PageTable, name, lambda *args, method=method, name=name: (calls.append(name), method(*args))[1]
        )
    cache = FP8Cache(make(num_hidden_layers=LAYERS))
    x, q = torch.randn(2, 2, 127, 64), torch.randn(2, 4, 127, 64)
    step(cache, module, x, q)
    assert calls == ["reserve", "to_device", "advance"]
    calls.clear()
    x, q = x[:, :, :1], q[:, :, :1]
    step(cache, module, x, q)
    assert calls == ["advance"]
    calls.clear()
    step(cache, module, x, q)  # of new pages
    assert calls == ["reserve", "to_device", "advance"]
    # 64 for a layer when each kept its accounts; `docs/architecture.md` says which hops there are.
    assert called(lambda: step(cache, module, x, q)) <= 42 * LAYERS
