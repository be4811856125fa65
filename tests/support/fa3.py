"""Imitations of builds of FlashAttention-3: the schemas of real builds, with an emulated kernel. (`conftest.builds`
installs them.)
"""

import torch

HEAD = (
    "Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = "
    "None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None, "
    "Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, Tensor? k_descale = None, "
    "Tensor? v_descale = None, "
)
UPSTREAM = (  # flash-attention's own, and fa3-fwd 0.0.3's
    HEAD
    + "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, Tensor? scheduler_metadata = "
    "None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0"
)
VLLM = HEAD.replace(" = None", "") + (  # 0.22's: no defaults, and arguments of its own
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, bool "
    "is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux, "
    "int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k"
)


def exact(q, k, v, scale, causal):
    """Attention of `[B, S, H, D]` in float64, with a causal mask aligned to the last key."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(group, 1)).transpose(1, 2)


def in_the_tensor_core(products, acc):
    """`acc + products.sum(0)` as a Hopper FP8 tensor core computes it: all terms are truncated below 2^-13 of the power
    of two of the largest one."""
    largest = torch.maximum(acc.abs(), products.abs().amax(0))
    unit = torch.exp2(torch.floor(torch.log2(largest)) - 13)
    return ((acc / unit).trunc() + (products / unit).trunc().sum(0)) * unit


def equal_weights(k, v, levels):
    """The output `[head_dim]` of a kernel for keys that all weigh the same:
    32 products at a time, two-level every 128.
    """
    assert not k.float().any()
    v = v[0, :, 0].double() * 256.0  # weights are held as 2^8
    total = torch.zeros(v.shape[1], dtype=torch.float64)
    for tile in v.split(128):
        acc = torch.zeros_like(total) if levels == 2 else total
        for products in tile.split(32):
            acc = in_the_tensor_core(products, acc)
        total = total + acc if levels == 2 else acc
    return total / (256.0 * len(v))


class Fake:
    """A `fwd` of some schema in a namespace of its own, which notes what it is given."""

    def __init__(self, schema, levels=None):
        self.levels, self.calls = levels, []
        self.namespace = f"fp8attn_test_{id(self)}"
        self.library = torch.library.Library(self.namespace, "DEF")
        self.library.define(f"fwd({schema}) -> Tensor[]")
        self.library.impl("fwd", self.forward, "CPU")
        arguments = getattr(torch.ops, self.namespace).fwd.default._schema.arguments
        self.defaults = {argument.name: argument.default_value for argument in arguments}

    def forward(self, *args, **named):
        given = (
            self.defaults | dict(zip(self.defaults, args, strict=False)) | named
        )  # the dispatcher leaves out what is default
        self.calls.append(given)
        return [given["out"].copy_(self.attend(given))]

    def attend(self, given):
        q, k, v = given["q"], given["k"], given["v"]
        if self.levels is not None:
            return equal_weights(k, v, self.levels).expand(q.shape)
        flat = q.dim() == 3
        if flat:
            q, k, v = (x.unflatten(0, (-1, given[f"max_seqlen_{n}"])) for x, n in ((q, "q"), (k, "k"), (v, "k")))
        q, k, v = (
            x.double()
            * (
                1.0
                if scale is None
                else scale.double().repeat_interleave(x.shape[2] // scale.shape[1], 1)[:, None, :, None]
            )
            for x, scale in zip((q, k, v), (given[f"{n}_descale"] for n in "qkv"), strict=True)
        )
        out = exact(q, k, v, given["softmax_scale"], given["is_causal"])
        return out.flatten(0, 1) if flat else out
