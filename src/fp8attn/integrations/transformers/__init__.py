"""An 8-bit KV cache and 8-bit attention for transformers models.

    import fp8attn.integrations.transformers as fp8
    model = AutoModelForCausalLM.from_pretrained(path)
    model.generate(**inputs, cache=fp8.FP8Cache(model))

Importing this registers an attention function and a mask function under the new name `fp8_kv`
(`AttentionInterface.register`, `AttentionMaskInterface.register`). Nothing in transformers is replaced.
`FP8Cache(model)` sets the model's attention implementation to `fp8_kv`. Under any other the cache returns dequantized
tensors: the same answers in the same memory, but slower.

A model passes what `update` returns to its attention function. So `FP8Cache.update` returns `PagedTensor`s, which carry
the pages: `fp8_kv` reads the pages, and every other function gets dequantized values. Layers of one shape and window
share a `PagedKVCache`, which is made when the first K and V show their shape.

| file | what |
|---|---|
| `cache.py` | `FP8Cache` |
| `build.py` | which layers it has, by model and options |
| `layers.py` | its layers in FP8, with a window and with a state too; the `PagedKVCache` that they share |
| `kept.py` | full-attention layers of a static cache in 16 bits |
| `attention.py`, `masks.py` | the functions `fp8_kv` |
| `latent.py` | latent attention (MLA) over pages of latents |
| `tensors.py` | `PagedTensor` |
| `config.py`, `decoder.py` | what is read from a config; the decoder of a model, and the devices of its layers |
| `weights.py`, `biases.py` | means, rotation, layers in 16 bits, how keys follow from values; what biases do |
| `files.py` | a cache in a file |
"""

from ...extras import needs

with needs("hf"):
    from transformers import AttentionInterface, AttentionMaskInterface

from .attention import fp8_kv_attention
from .build import edge_layers
from .cache import FP8Cache
from .config import unsupported_reason
from .masks import fp8_kv_mask
from .tensors import ATTN_IMPLEMENTATION

AttentionInterface.register(ATTN_IMPLEMENTATION, fp8_kv_attention)
AttentionMaskInterface.register(ATTN_IMPLEMENTATION, fp8_kv_mask)

__all__ = [
    "ATTN_IMPLEMENTATION",
    "FP8Cache",
    "edge_layers",
    "fp8_kv_attention",
    "fp8_kv_mask",
    "unsupported_reason",
]
