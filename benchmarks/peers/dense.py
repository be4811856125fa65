"""Peers of sequences of equal lengths: torch's attention, cuDNN's FP8 graph, torchao."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..problem import DEVICE, Run, Shape
from .rounded import by_heads


def check(shape: Shape) -> None:
    """Raise ValueError for a problem that these peers do not support."""
    if not shape.uniform:
        raise ValueError("no ragged batches")
    if masked(shape) and shape.queries != shape.keys:
        raise ValueError("its causal mask is aligned to the start")


def masked(shape: Shape) -> bool:
    """Whether some query sees fewer than all keys. The query of a decode step sees all."""
    return shape.causal and max(shape.queries) > 1


def batched(shape: Shape, *xs: torch.Tensor) -> list[torch.Tensor]:
    """`[tokens, heads, head_dim]` of equal lengths as `[batch, heads, length, head_dim]`."""
    return [x.unflatten(0, (len(shape.keys), -1)).transpose(1, 2) for x in xs]


def rows(out: torch.Tensor) -> torch.Tensor:
    """`[batch, heads, length, head_dim]` as `[tokens, heads, head_dim]`."""
    return out.transpose(1, 2).flatten(0, 1)


def _sdpa(backend: SDPBackend, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    check(shape)
    given = batched(shape, q, k, v)
    options = {"is_causal": masked(shape), "enable_gqa": shape.q_heads != shape.kv_heads}

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return rows(scaled_dot_product_attention(*given, **options))

    return Run(call, q, shape.split(k, v))


cudnn_bf16 = partial(_sdpa, SDPBackend.CUDNN_ATTENTION)
flash_bf16 = partial(_sdpa, SDPBackend.FLASH_ATTENTION)


def torchao(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    from torchao.prototype.attention.fp8_fa3.attention import fp8_fa3_sdpa

    check(shape)
    given = batched(shape, q, k, v)
    return Run(lambda: rows(fp8_fa3_sdpa(*given, is_causal=masked(shape))), q, shape.split(k, v))


SCALE_P = 256.0  # P is at most one; E4M3 ends at 448


def cudnn_fp8(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """cuDNN's FP8 attention, with one scale a tensor; FP8 out, scaled by V's scale.

    Raises:
        Exception: of a type of cuDNN's own, if it has no plan for this.
    """
    check(shape)
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (by_heads(x, 1) for x in (q, k, v))
    q, k, v = batched(shape, q8.bits, k8.bits, v8.bits)
    graph, handle, inputs, output, scales, amaxes = _cudnn_graph(*(x for t in (q, k, v) for x in (t.shape, t.stride())), masked(shape))
    out = torch.empty_like(q)
    workspace = torch.empty(max(1, graph.get_workspace_size()), device=DEVICE, dtype=torch.uint8)
    p_scale, *amax = (torch.ones(1, device=DEVICE) for _ in range(3))
    p_scale *= SCALE_P
    given = (q_scale, k_scale, v_scale, 1 / p_scale, p_scale, 1 / v_scale)
    tensors = dict(zip((*inputs, output, *amaxes, *scales), (q, k, v, out, *amax, *given), strict=True))
    buffers = {tensor: x.data_ptr() for tensor, x in tensors.items()}

    def call() -> torch.Tensor:
        graph.execute(buffers, workspace, handle=handle)
        return rows(out)

    call.tensors = tensors  # pointers keep nothing alive
    return Run(call, q8, shape.split(k8, v8), unit=float(v_scale))


@lru_cache
def _cudnn_graph(q_shape, q_stride, k_shape, k_stride, v_shape, v_stride, causal: bool):
    """A built plan for data of these shapes: (graph, handle, inputs, output, scales, other outputs). Scales: Q, K, V, P twice, output."""
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    fp8, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)
    shapes = ("q", q_shape, q_stride), ("k", k_shape, k_stride), ("v", v_shape, v_stride)
    inputs = [graph.tensor(name=name, dim=list(shape), stride=list(stride), data_type=fp8) for name, shape, stride in shapes]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {name: graph.tensor(name=name, dim=[1] * 4, stride=[1] * 4, data_type=fp32) for name in names}
    output, _, *amaxes = graph.sdpa_fp8(
        **dict(zip("qkv", inputs, strict=True)), **scales, is_inference=True, attn_scale=q_shape[-1] ** -0.5, use_causal_mask=causal
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
