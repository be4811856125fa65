// SageAttention's kernel for SM90 as a torch op, with only what the benchmarks call: scales by thread, 16-bit output in BF16, no LSE.
#include "csrc/dispatch_utils.h"

#undef DISPATCH_QK_QUANT_GRAN
#define DISPATCH_QK_QUANT_GRAN(given, NAME, ...) { constexpr int NAME = 3; __VA_ARGS__ }
#undef DISPATCH_RETURN_LSE
#define DISPATCH_RETURN_LSE(given, NAME, ...) { constexpr bool NAME = false; __VA_ARGS__ }
#undef DISPATCH_PYTORCH_DTYPE_TO_CTYPE_FP16
#define DISPATCH_PYTORCH_DTYPE_TO_CTYPE_FP16(given, NAME, ...) { using NAME = nv_bfloat16; __VA_ARGS__ }

#include "csrc/qattn/qk_int_sv_f8_cuda_sm90.cu"

#include <torch/library.h>

static void attend(torch::Tensor q, torch::Tensor k, torch::Tensor v, torch::Tensor out, torch::Tensor q_scale, torch::Tensor k_scale,
                   torch::Tensor v_scale, bool causal, double softmax_scale) {
  qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf(q, k, v, out, q_scale, k_scale, v_scale, 1, causal, 3, softmax_scale, 0);
}

TORCH_LIBRARY(fp8attn_sage, m) {
  m.def("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor q_scale, Tensor k_scale, Tensor v_scale, bool causal, float softmax_scale) -> ()");
}
TORCH_LIBRARY_IMPL(fp8attn_sage, CUDA, m) { m.impl("attend", &attend); }
