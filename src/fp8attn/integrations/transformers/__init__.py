"""FP8 KV cache and attention for transformers models.

    import fp8attn.integrations.transformers as fp8
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="fp8_kv")
    model.generate(**inputs, past_key_values=fp8.FP8Cache(model.config))

Importing this registers one attention function and one mask function under the new name `fp8_kv` (`AttentionInterface.register`,
`AttentionMaskInterface.register`); no name that transformers has is changed. Under any other attention implementation `FP8Cache`
returns dequantized tensors: the same answers, and the memory, without the speed.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from .attention import fp8_kv_attention, fp8_kv_mask
from .cache import FP8Cache, edge_layers
from .tensors import ATTN_IMPLEMENTATION

AttentionInterface.register(ATTN_IMPLEMENTATION, fp8_kv_attention)
AttentionMaskInterface.register(ATTN_IMPLEMENTATION, fp8_kv_mask)

__all__ = ["ATTN_IMPLEMENTATION", "FP8Cache", "edge_layers", "fp8_kv_attention", "fp8_kv_mask"]
