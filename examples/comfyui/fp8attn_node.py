"""A node of ComfyUI: 8-bit attention for a model. Copy this file into ComfyUI/custom_nodes, and install fp8attn into ComfyUI's environment.

Put the node "FP8 attention (fp8attn)" between the loader of a model and its sampler. Short calls, calls with a mask and the left-out blocks
and steps run ComfyUI's own attention.
"""

from fp8attn import AttentionPolicy
from fp8attn.integrations.comfyui import fp8_model

LAST = 10_000


class FP8Attention:
    """Patches a MODEL with `fp8_model`."""

    CATEGORY = "model_patches"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    DESCRIPTION = "Runs attention in 8 bits: faster on H100 and H200 from about 8,192 tokens on (long videos, large images)."

    @classmethod
    def INPUT_TYPES(cls):  # ComfyUI's name
        def count(default, tooltip):
            return ("INT", {"default": default, "min": 0, "max": LAST, "tooltip": tooltip})

        return {
            "required": {
                "model": ("MODEL",),
                "min_length": ("INT", {"default": 8192, "min": 0, "max": 1 << 20, "tooltip": "Shorter calls stay in 16 bits. Tokens."}),
                "skip_first": count(0, "The first blocks that stay in 16 bits."),
                "skip_last": count(0, "The last blocks that stay in 16 bits."),
                "first_step": count(0, "The steps before this one stay in 16 bits."),
                "last_step": count(LAST, "The steps after this one stay in 16 bits."),
            }
        }

    def patch(self, model, min_length, skip_first, skip_last, first_step, last_step):
        steps = None if (first_step, last_step) == (0, LAST) else range(first_step, last_step + 1)
        return (fp8_model(model, AttentionPolicy(min_length=min_length, skip_first=skip_first, skip_last=skip_last, steps=steps)),)


NODE_CLASS_MAPPINGS = {"FP8Attention": FP8Attention}
NODE_DISPLAY_NAME_MAPPINGS = {"FP8Attention": "FP8 attention (fp8attn)"}
