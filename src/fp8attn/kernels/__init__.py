"""The Triton kernels. `backends` imports them when a call needs them."""
