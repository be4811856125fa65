"""Codecs by the dtype of their codes."""

from fp8attn.formats.codec import CODECS

OF_DTYPE = {codec.dtype: codec for codec in CODECS.values()}
