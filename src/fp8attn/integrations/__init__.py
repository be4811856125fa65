"""fp8attn in other libraries. A module here imports its library, so the rest of the package imports it only when it is
used.

| module | what |
|---|---|
| `transformers/` | `FP8Cache`, and attention over its pages |
| `diffusers.py` | `fp8_transformer`: attention of its models in 8 bits |
| `engine/` | what a plugin of any serving engine needs; it imports no engine |
| `vllm/` | the plugin for vLLM; that for SGLang is a distribution of its own, `plugins/sglang` |
| `k_eq_v.py` | keys that follow from values (Gemma 4), as latents |
| `warmup.py` | `warmup`: compiles the kernels of a model before it serves |

ComfyUI's node is one file of `examples/comfyui/`.
"""
