"""The format of a cache, in plain PyTorch: codecs, the fixed rotation, RoPE."""
