"""Triton kernels, one file a kernel. Imported by `backends`, when a call needs them."""
