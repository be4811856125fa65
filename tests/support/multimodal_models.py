"""Small random vision-language models, whose text models have biases in K."""

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel

HIDDEN, HEAD_DIM = 256, 128  # of the text models
TEXT = {
    "vocab_size": 89, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
IMAGES = {"image_token_id": 80, "video_token_id": 81, "vision_start_token_id": 82, "vision_end_token_id": 83}
AUDIO = {"d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "output_dim": HIDDEN}
# Pairs of channels that rotate with the time, the height and the width of a position.
QWEN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
GLM = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [8, 12, 12],
        "partial_rotary_factor": 0.5,
    }
}
ONE = {"depth": 1, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": HIDDEN}  # layer of a vision model
# The class of each family, its text config, its vision config but for the size, which name the size has, and more of
# its config.
FAMILIES = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", QWEN, {"depth": 1, "num_heads": 2, "hidden_size": HIDDEN},
    "embed_dim", IMAGES),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", QWEN, ONE, "hidden_size", IMAGES),
    "qwen2_5_omni_thinker": (
        "Qwen2_5OmniThinkerForConditionalGeneration", QWEN, ONE, "hidden_size",
        {"image_token_id": 80, "video_token_id": 81, "audio_token_id": 84, "audio_config": AUDIO},
    ),
    "video_llama_3": (
        "VideoLlama3ForConditionalGeneration", {"model_type": "qwen2"},
        {"num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64}, "hidden_size", IMAGES,
    ),
    "glm4v": ("Glm4vForConditionalGeneration", GLM, ONE, "hidden_size", IMAGES),
    "glm46v": ("Glm46VForConditionalGeneration", GLM, ONE, "hidden_size", IMAGES),
}  # fmt: skip


def make(family: str, vision_head_dim: int = 80, slow: int = 8) -> PreTrainedModel:
    """A random float32 model. The `slow` pairs of K that rotate the slowest have biases of several deviations, in every
    layer.
    """
    cls, text, vision, size, more = FAMILIES[family]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](
        text_config={**TEXT, **text}, vision_config={**vision, size: 2 * vision_head_dim}, **more
    )
    model = getattr(transformers, cls)(config).eval()
    for name, p in model.named_parameters():
        if p.dim() >= 2:
            p.data.normal_(std=0.9 / p.shape[-1] ** 0.5 if "embed" not in name else 1.0)
        elif name.endswith("k_proj.bias") and not {"visual", "vision_model", "audio_tower"} & {*name.split(".")}:
            p.data.zero_()
            p.data.view(2, -1)[:, -slow:] = (
                8.0  # of a Qwen; GLM's pairs are neighbors, and half of its channels do not rotate
            )
    return model
