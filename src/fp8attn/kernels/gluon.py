"""Everything the Hopper kernels take from Gluon, in one place, because its API moves between Triton versions (3.6 to 3.9 here)."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed in 3.7

__all__ = ["TensorDescriptor", "aggregate", "gl", "gluon", "mbarrier", "mma_v2", "thread_barrier", "tma"]
