"""cuDNN's FP8 graph, of the newest cuDNN if it is collected: one scale a tensor, P by 256, FP8 out, sums in the tensor
core.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from functools import lru_cache

import torch

from ..problem import DEVICE, Run, Shape
from . import dense
from .peer import Call, Peer, Wheel, import_wheel, library
from .rounded import by_heads

# Of a wheel of 517 MB, what attention needs: the graphs, and the engines that are compiled when a plan is built.
# NVIDIA's own small cuDNN, `nvidia-cudnn-jit-cu13`, has the same libraries, and appears later.
LIBRARIES = ("cudnn_graph", "cudnn_engines_runtime_compiled")
SCALE_P = 256.0  # P is at most one; E4M3 ends at 448


def attention(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """cuDNN's FP8 attention, with one scale a tensor; FP8 out, scaled by V's scale.

    Raises:
        Exception: of a type of cuDNN's own, if it has no plan for this.
    """
    dense.check(shape)
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (by_heads(x, 1) for x in (q, k, v))
    q, k, v = dense.batched(shape, q8.bits, k8.bits, v8.bits)
    graph, handle, inputs, output, scales, amaxes = _cudnn_graph(
        *(x for t in (q, k, v) for x in (t.shape, t.stride())), dense.masked(shape)
    )
    out = torch.empty_like(q)
    workspace = torch.empty(max(1, graph.get_workspace_size()), device=DEVICE, dtype=torch.uint8)
    p_scale, *amax = (torch.ones(1, device=DEVICE) for _ in range(3))
    p_scale *= SCALE_P
    given = (q_scale, k_scale, v_scale, 1 / p_scale, p_scale, 1 / v_scale)
    tensors = dict(zip((*inputs, output, *amaxes, *scales), (q, k, v, out, *amax, *given), strict=True))
    buffers = {tensor: x.data_ptr() for tensor, x in tensors.items()}

    def call() -> torch.Tensor:
        graph.execute(buffers, workspace, handle=handle)
        return dense.rows(out)

    call.tensors = tensors  # pointers keep nothing alive
    return Run(call, q8, shape.split(k8, v8), unit=float(v_scale))


@lru_cache
def _cudnn_graph(q_shape, q_stride, k_shape, k_stride, v_shape, v_stride, causal: bool):
    """A built plan for data of these shapes: (graph, handle, inputs, output, scales, other outputs). Scales: Q, K, V, P
    twice, output.
    """
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    fp8, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)
    shapes = ("q", q_shape, q_stride), ("k", k_shape, k_stride), ("v", v_shape, v_stride)
    inputs = [
        graph.tensor(name=name, dim=list(shape), stride=list(stride), data_type=fp8) for name, shape, stride in shapes
    ]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {name: graph.tensor(name=name, dim=[1] * 4, stride=[1] * 4, data_type=fp32) for name in names}
    output, _, *amaxes = graph.sdpa_fp8(
        **dict(zip("qkv", inputs, strict=True)),
        **scales,
        is_inference=True,
        attn_scale=q_shape[-1] ** -0.5,
        use_causal_mask=causal,
    )
    output.set_output(True).set_dim(list(q_shape)).set_stride(list(q_stride))
    for amax in amaxes:
        amax.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(fp32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph, handle, inputs, output, tuple(scales.values()), amaxes


def load() -> None:
    """Load the newest cuDNN's libraries, if they are there, and the frontend.

    `libcudnn`, which torch has loaded, opens the others by name when it is first called, and finds these: torch's own
    calls go to the newest cuDNN, too.
    """
    with contextlib.suppress(FileNotFoundError):
        for path in [library(name) for name in LIBRARIES]:
            ctypes.CDLL(str(path))
    import_wheel("cudnn", "nvidia_cudnn_frontend")


PEER = Peer(
    calls={"cudnn-fp8": Call(attention, "cuDNN", "#f6d186", prefill=True, levels=1)},
    needs=(
        Wheel("nvidia-cudnn-cu13==9.28.1.4", {name: f"nvidia/cudnn/lib/lib{name}.so.9" for name in LIBRARIES}),
        Wheel("nvidia-cudnn-frontend==1.18.0"),
    ),
    load=load,
    release=lambda: f"cuDNN {torch.backends.cudnn.version()}, frontend {sys.modules['cudnn'].__version__}",
)
