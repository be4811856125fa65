"""The Triton and Gluon kernels (docs/kernels.md). `backends` imports them when a call needs them.

| module | what |
|---|---|
| `append/` | writes pages |
| `prefill/`, `decode/` | attention on Hopper: of many queries in 8 bits, of few in 16 bits |
| `latent/hopper/` | attention over latents (MLA) on Hopper, in 8 bits |
| `portable/` | attention on any GPU, in 16 bits |
| `latent/` | latents (MLA) on any GPU: writes their pages, and attention in 16 bits |
| `combine.py` | attention over all keys from attention over parts of them |
| `common.py` | definitions that all kernels share |
| `tiles.py`, `view.py` | pages in shared memory; how TMA sees a tensor |
| `codec.py`, `rotation.py` | device code of codes and scales, and of the rotation |
| `memory.py` | numbers and barriers in shared memory |
| `ptx.py`, `gluon.py` | inline PTX; all names of Gluon, which changes between Triton versions |
| `operands.py` | changes of the PTX that Triton makes |
| `launch.py`, `cuda.py` | cheap launches; how CUDA's driver is called |
| `counters.py` | counters that are zero before and after each launch |
| `compile.py`, `keys.py` | compiling a recorded launch without a GPU; one key for a kernel in all processes |
| `devices.py`, `machine.py` | the measured speed of GPUs; their properties, and where the Hopper kernels run |
"""
