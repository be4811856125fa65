"""The format of a cache, in plain PyTorch. Kernels repeat these definitions, to the same bits.

| file | what |
|---|---|
| `spec.py` | `PageSpec`: what a page holds, without tensors; which pages exist |
| `kv_format.py` | `KVFormat`: what the bytes of a layer's pages mean |
| `page_layout.py` | `PageLayout`: where each byte of a page is |
| `codec.py` | 8-bit codes of K and V, and their scales |
| `rotation.py` | the fixed rotation of keys and queries |
| `latent.py` | how latents (MLA) are rounded, and what follows for attention |
| `rope.py` | RoPE, for callers and for dense calls |
"""
