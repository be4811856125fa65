"""Makes dry calls of many lengths and batches with the public functions, and prints as JSON which of their kernels
`warmup` does not list.

A process of its own (`test_calls.py` runs it), because plans for the device "meta" are kept for one machine.

    python -m tests.precompile.run_calls TARGET [case substring]
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fp8attn.integrations.transformers as fp8
from fp8attn import PagedKVCache, _torch_ops, backends, ops, scaled_dot_product_attention
from fp8attn.backends import hopper
from fp8attn.cache import paged
from fp8attn.dense import sdpa
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.spec import SPARE, PageSpec, spec_of
from fp8attn.kernels.compile import specialization
from fp8attn.kernels.launch import Launch, recording
from fp8attn.kernels.machine import plan_for
from fp8attn.pages import KVPages
from fp8attn.params import LONG, BackendName
from fp8attn.precompile import first
from fp8attn.precompile.calls import Layer, calls_of
from tests.support.machines import TARGETS

LLAMA = Layer(32, 8, 128)
CASES = {
    "llama": [LLAMA],
    "llama, float16, e4m3": [replace(LLAMA, dtype=torch.float16, key_dtype="e4m3", rotate_keys=False)],
    "d64": [Layer(12, 12, 64)],
    "d256": [Layer(8, 4, 256)],
    "d80": [Layer(32, 1, 80)],
    "d512": [Layer(8, 1, 512)],
    "biases": [replace(Layer(28, 4, 128), k_mean=k, v_mean=v) for k in (False, True) for v in (False, True)],
    "calibrated": [replace(LLAMA, k_mean=True, v_mean=True, static_scales=True)],
    "an engine's": [replace(LLAMA, advance=False)],
    "an engine's, window": [replace(Layer(8, 4, 256), advance=False, attention=frozenset(("window",)))],
    "an engine's, d512": [replace(Layer(8, 1, 512), advance=False)],
    "an engine's, latents": [Layer(32, 4, PageSpec.latent(512, 128, True, SPARE), advance=False)],
    "an engine's, latents that only decodes attend to": [
        Layer(16, 1, PageSpec.latent(512, 64), advance=False, longest=4)
    ],
    "window": [replace(LLAMA, attention=frozenset(has)) for has in ((), ("window",))],
    "softcap, window": [
        replace(Layer(16, 8, 256), attention=frozenset(has)) for has in (("softcap",), ("softcap", "window"))
    ],
    "sinks, window": [replace(Layer(64, 8, 64), attention=frozenset(has)) for has in (("sinks",), ("sinks", "window"))],
}
PLAIN = {"llama", "d64", "d256", "d80"}  # cases of dense calls
WITHOUT_DENSE = {
    "an engine's",
    "an engine's, window",
    "an engine's, d512",
    "calibrated",
}  # whose layers make none: their kernels must not be listed


def sizes(seed: int, most: int) -> list[tuple[int, int, int]]:
    """(New tokens of a sequence, sequences, tokens in the cache): every step, and prompts: each third case has each
    short length.
    """
    draw = random.Random(seed)
    steps = [(n, batch, draw.randrange(0, 100_000)) for n in range(1, 17) for batch in (1, 5, 32, 33, 64)]
    prompts = [
        (n, draw.choice((1, 1, 1, 2, 3, 5, 8, 13, 20, 64)), draw.choice((0, 0, 999, 99_999)))
        for n in range(17 + seed % 3, 131, 3)
    ]
    for _ in range(most):
        n = round(2 ** draw.uniform(5, 15))
        prompts.append(
            (n, draw.randint(1, max(1, min(64, (1 << 18) // n))), draw.choice((0, 0, draw.randrange(1, 100_000))))
        )
    exact = [(n, 1, 0) for n in (5, 100, 1000, 4096, 9000, 32767, 32768)] + [(300, 1, 9999)]
    return steps + prompts + exact


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def held(layer: Layer, batch: int, tokens: int) -> KVPages:
    """Pages of sequences with these numbers of tokens."""
    columns = -(-tokens // 128)
    mean = meta(layer.num_kv_heads, layer.spec.k_dim, dtype=torch.float32)
    means = mean if layer.k_mean else None, mean if layer.v_mean else None
    form = KVFormat(layer.spec.name, layer.rotate_keys, *means)
    return KVPages(
        meta(batch * columns, layer.num_kv_heads, form.layout.nbytes, dtype=torch.uint8),
        meta(batch, columns + 3, dtype=torch.int32)[:, :columns], meta(batch, dtype=torch.int32), form,
    )  # fmt: skip


def serve(layer: Layer, tokens: int, batch: int, before: int, draw: random.Random) -> None:
    """Runs a prompt or a step of the layer: with equal lengths, with padding on the left, and ragged. An engine's have
    bounds, but for one token of each and for prompts of one length.
    """
    dtype = layer.dtype
    pages = held(layer, batch, before + tokens)
    has = layer.attention
    options = {
        "softcap": 30.0 if "softcap" in has else None,
        "window": draw.choice((1, 127, 1024, 4095)) if "window" in has else None,
    }
    options["sinks"] = meta(layer.num_q_heads, dtype=dtype) if "sinks" in has else None
    options |= {"softmax_scale": 1.0} if layer.spec.v_in_k else {}
    q = meta(batch * tokens, layer.num_q_heads, layer.spec.k_dim, dtype=dtype)
    k, v = (
        meta(batch * tokens, layer.num_kv_heads, 2 * width, dtype=dtype)[..., :width] for width in layer.spec.widths
    )  # of a fused projection
    counted = {"static_scales": layer.static_scales, "advance": layer.advance}
    attend = ops.attention if tokens <= layer.longest else lambda *_, **options: None
    if layer.advance or not 1 < tokens <= LONG:
        ops.append(pages, k, v, **counted)
        attend(q, pages, **options)
        attend(q, pages, out=torch.empty_like(q[..., : layer.spec.v_dim]), **options)
    if layer.advance:
        if "window" not in has and (tokens * layer.num_q_heads > 128 * layer.num_kv_heads or tokens == 1):
            attend(q, held(layer, batch, tokens), causal=False, **options)
        attend(q, pages, leftpad_k=meta(2, batch, dtype=torch.int32)[0], **options)
    total = draw.randint(tokens, batch * tokens)
    bounds = meta(batch + 1, dtype=torch.int32)
    ops.append(pages, k[:total], v[:total], cu_seqlens=bounds, max_seqlen=tokens, **counted)
    attend(q[:total], pages, cu_seqlens_q=bounds, max_seqlen_q=tokens, **options)
    if not layer.static_scales and layer.advance and before == 0:
        cache = PagedKVCache(
            layer.num_kv_heads, layer.head_dim, num_seqs=batch, key_dtype=layer.key_dtype,
            rotate_keys=layer.rotate_keys, device="meta",
            k_mean=pages.format.stored_k_mean, v_mean=pages.format.v_mean,
        )  # fmt: skip
        cache.append(0, k, v)
        attend(q, cache.pages(0), **options)


def dense(layer: Layer, tokens: int, batch: int) -> None:
    """Attention with as many keys as queries, in both memory orders."""
    dtype = layer.dtype
    group = layer.num_q_heads // layer.num_kv_heads
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        q, k = (
            meta(*(shape[i] for i in order), dtype=dtype).permute(*order)
            for shape in ((batch, heads, tokens, layer.head_dim) for heads in (layer.num_q_heads, layer.num_kv_heads))
        )
        scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        if tokens * group > 128 or tokens == 1:
            scaled_dot_product_attention(q, k, k, enable_gqa=True)


def model(layer: Layer) -> None:
    """One layer of a Llama through `FP8Cache`, growing and static."""
    config = LlamaConfig(
        hidden_size=layer.num_q_heads * layer.head_dim, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=layer.num_q_heads,
        num_key_value_heads=layer.num_kv_heads, head_dim=layer.head_dim, vocab_size=64, max_position_embeddings=1 << 17,
    )  # fmt: skip
    config._attn_implementation = fp8.ATTN_IMPLEMENTATION
    with torch.device("meta"):
        built = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    for length in (None, 4096):
        for batch in (1, 3):
            cache = fp8.FP8Cache(built, max_cache_len=length)
            for tokens in (5, 1, 1000, 100, 1, 2, 16, 17):
                built(
                    meta(batch, tokens, dtype=torch.int64),
                    past_key_values=cache,
                    position_ids=meta(batch, tokens, dtype=torch.int64),
                )


def launched(call: Callable[[], object]) -> list[Launch]:
    with recording(dry=True) as made:
        call()
        return list(made)


@torch.inference_mode()
def main() -> None:
    target, *words = sys.argv[1:]
    plan_for(TARGETS[target])

    def backend(spec_name: str) -> BackendName:
        return "hopper" if target == "sm_90" and hopper.refusal(spec_of(spec_name)) is None else "triton"

    _torch_ops.find = sdpa.find = lambda *given: backends.load(backend(given[-1]))
    sdpa.unsupported_reason = lambda *_: None
    paged._device = torch.device  # "meta", which caches refuse
    torch._assert_async = lambda *_: None
    found = {}
    for name, layers in CASES.items():
        if words and not any(word in name for word in words):
            continue
        layers = [replace(layer, backend=backend(layer.spec.name)) for layer in layers]
        known: dict = {}
        for layer in layers:
            known |= first.record(calls_of(layer))
        missing, count = {}, 0
        of_pages, of_dense = set(), set()
        for layer in layers:
            calls = [partial(serve, layer, *size, random.Random(1)) for size in sizes(len(found), 40)]
            dense_calls = (
                [partial(dense, layer, *size[:2]) for size in sizes(len(found), 20)]
                if name in PLAIN | WITHOUT_DENSE
                else []
            )
            if name in PLAIN:
                calls.append(partial(model, layer))
            for call in calls + dense_calls:
                for made in launched(call):
                    count += 1
                    key = specialization(made)
                    (of_dense if call.func is dense else of_pages).add(key)
                    if key not in known and not (call.func is dense and name in WITHOUT_DENSE):
                        missing.setdefault(str(key), f"{call.func.__name__}{call.args[1:]}")
        only_dense = sorted(key[0] for key in known.keys() & of_dense - of_pages)
        found[name] = {
            "kernels": sorted(key[0] for key in known),
            "launches": count,
            "missing": missing,
            "only dense": only_dense,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
