// Comfy Kitchen's INT8 attention as torch ops: its quantization, and its kernel for head_dim 128, BF16 and more than 1,024 keys without a
// mask, as `sage_sdpa_quantize` and `sage_sdpa_prequantized` launch them.
#include <ATen/cuda/CUDAContext.h>
#include <torch/library.h>
#include <torch/types.h>

#include "comfy_launch.cuh"  // the launcher's template

extern "C" void launch_quant_qk_per_thread_int8(
    const void *q, void *q_int8, void *q_scale, const void *k, void *k_int8, void *k_scale, int B, int H_q, int Lq, int H_kv, int Lk, int C,
    int BLKQ, int WARPQ, int BLKK, int WARPK, int64_t q_stride_b, int64_t q_stride_h, int64_t q_stride_n, int64_t k_stride_b,
    int64_t k_stride_h, int64_t k_stride_n, int input_dtype_code, void *anchor_indices, cudaStream_t stream);
extern "C" void launch_quant_v_int8_kernel(const void *v, void *out, void *scale, int B, int H, int N, int D, int padded_N, int64_t sb,
                                           int64_t sh, int64_t sn, int input_dtype_code, cudaStream_t stream);

constexpr int DIM = 128, KEYS = 128, BF16 = 2;

// Q, K and V are [B, H, S, D]; V in 8 bits is [B * H * D, S padded to KEYS]. `anchor` is [B, H of K] int32, scratch.
static void quantize(at::Tensor q, at::Tensor k, at::Tensor v, at::Tensor q8, at::Tensor q_scale, at::Tensor k8,
                     at::Tensor k_scale, at::Tensor v8, at::Tensor v_scale, at::Tensor anchor) {
  cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  launch_quant_qk_per_thread_int8(
      q.data_ptr(), q8.data_ptr(), q_scale.data_ptr(), k.data_ptr(), k8.data_ptr(), k_scale.data_ptr(), q.size(0), q.size(1), q.size(2),
      k.size(1), k.size(2), DIM, 128, 32, KEYS, KEYS, q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2), BF16,
      anchor.data_ptr(), stream);
  launch_quant_v_int8_kernel(v.data_ptr(), v8.data_ptr(), v_scale.data_ptr(), v.size(0), v.size(1), v.size(2), DIM, v8.size(1),
                             v.stride(0), v.stride(1), v.stride(2), BF16, stream);
}

static void attend(at::Tensor q8, at::Tensor k8, at::Tensor v8, at::Tensor out, at::Tensor q_scale, at::Tensor k_scale,
                   at::Tensor v_scale, double softmax_scale) {
  const int batch = q8.size(0), q_heads = q8.size(1), queries = q8.size(2), kv_heads = k8.size(1), keys = k8.size(2), padded = v8.size(1);
  launch_impl<DIM, KEYS, MaskMode::kNone, nv_bfloat16, true>(
      q8.data_ptr<int8_t>(), k8.data_ptr<int8_t>(), v8.data_ptr<int8_t>(), static_cast<nv_bfloat16 *>(out.data_ptr()),
      q_scale.data_ptr<float>(), k_scale.data_ptr<float>(), v_scale.data_ptr<float>(), nullptr, 0, 0, 0, 0, -1, queries, keys, q_heads,
      q_heads / kv_heads, q_heads * queries * DIM, DIM, queries * DIM, kv_heads * keys * DIM, DIM, keys * DIM, kv_heads * DIM * padded,
      DIM * padded, padded, q_heads * queries * DIM, DIM, queries * DIM, static_cast<float>(softmax_scale), batch,
      at::cuda::getCurrentCUDAStream());
}

TORCH_LIBRARY(fp8attn_comfy, m) {
  m.def("quantize(Tensor q, Tensor k, Tensor v, Tensor(a!) q8, Tensor(b!) q_scale, Tensor(c!) k8, Tensor(d!) k_scale, Tensor(e!) v8, "
        "Tensor(f!) v_scale, Tensor(g!) anchor) -> ()");
  m.def("attend(Tensor q8, Tensor k8, Tensor v8, Tensor(a!) out, Tensor q_scale, Tensor k_scale, Tensor v_scale, float softmax_scale) -> ()");
}
TORCH_LIBRARY_IMPL(fp8attn_comfy, CUDA, m) {
  m.impl("quantize", &quantize);
  m.impl("attend", &attend);
}
