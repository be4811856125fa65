"""Prints the key in Triton's cache of every kernel. `run_keys.py [reversed]`: the order in which they are computed."""

import json
import sys

from triton import JITFunction

from fp8attn.kernels import combine
from fp8attn.kernels.append import page, step
from fp8attn.kernels.decode import kernel as decode
from fp8attn.kernels.keys import compute_key
from fp8attn.kernels.portable import kernel as portable
from fp8attn.kernels.prefill import kernel as prefill

MODULES = combine, portable, page, step, decode, prefill

kernels = {
    name: value
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, JITFunction) and name.endswith("_kernel")
}
for name in sorted(kernels, reverse="reversed" in sys.argv):
    compute_key(kernels[name])
print(json.dumps({name: kernel.cache_key for name, kernel in kernels.items()}))
