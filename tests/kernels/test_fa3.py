"""FlashAttention-3 without one: builds of the schemas that are about, their kernels emulated; what the probe says of how they sum."""

import pytest
import torch

from fp8attn import accumulation
from fp8attn.accumulation import Accumulation, measure
from fp8attn.kernels import fa3
from fp8attn.layout import FP8
from fp8attn.numerics import relative_error

HEAD = (
    "Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, Tensor? page_table = None, "
    "Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None, Tensor? rotary_sin = None, "
    "Tensor? seqlens_rotary = None, Tensor? q_descale = None, Tensor? k_descale = None, Tensor? v_descale = None, "
)
UPSTREAM = (  # flash-attention's own, and fa3-fwd 0.0.3's
    HEAD + "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, "
    "int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0"
)
VLLM = HEAD.replace(" = None", "") + (  # 0.22's: no defaults, and arguments of its own
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, bool is_rotary_interleaved, "
    "Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, "
    "Tensor? cp_tot_seqused_k"
)


def exact(q, k, v, scale, causal):
    """`[B, S, H, D]` in float64, causal aligned to the last key."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(group, 1)).transpose(1, 2)


def in_the_tensor_core(products, acc):
    """`acc + products.sum(0)` as a Hopper FP8 tensor core sums: all are cut off below 2^-13 of the largest of them's power of two."""
    largest = torch.maximum(acc.abs(), products.abs().amax(0))
    unit = torch.exp2(torch.floor(torch.log2(largest)) - 13)
    return ((acc / unit).trunc() + (products / unit).trunc().sum(0)) * unit


def equal_weights(k, v, levels):
    """The output `[head_dim]` of a kernel for keys that all weigh the same: 32 products at a time, two-level every 128."""
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
        given = self.defaults | dict(zip(self.defaults, args, strict=False)) | named  # the dispatcher leaves out what is default
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
            x.double() * (1.0 if scale is None else scale.double().repeat_interleave(x.shape[2] // scale.shape[1], 1)[:, None, :, None])
            for x, scale in zip((q, k, v), (given[f"{n}_descale"] for n in "qkv"), strict=True)
        )
        out = exact(q, k, v, given["softmax_scale"], given["is_causal"])
        return out.flatten(0, 1) if flat else out


@pytest.fixture
def builds(monkeypatch):
    """Replaces the builds that there are: `builds(fa3_fwd_interface=Fake(...))`."""

    def install(**fakes):
        names = {name: (fakes[name].namespace if name in fakes else "fp8attn_no_such", "fp8attn_no_such", "*.so") for name in fa3.BUILDS}
        monkeypatch.setattr(fa3, "BUILDS", names)

    fa3.find.cache_clear()
    fa3.default.cache_clear()
    yield install
    fa3.find.cache_clear()
    fa3.default.cache_clear()


def attend(q, *args, **options):
    out = torch.full(q.shape, torch.nan, dtype=torch.bfloat16)
    fa3.attention(q, *args, **options, out=out)
    return out


def rows(batch=2, heads=4, kv_heads=2, q_len=7, kv_len=19, head_dim=16):
    torch.manual_seed(0)
    shapes = (batch, q_len, heads, head_dim), *((batch, kv_len, kv_heads, head_dim),) * 2
    return [torch.randn(shape).to(FP8) for shape in shapes], [0.5 + torch.rand(batch, kv_heads) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "schema"), [("flash_attn_interface", UPSTREAM), ("fa3_fwd_interface", UPSTREAM), ("vllm", VLLM)])
def test_a_build_is_called_by_its_schema(builds, name, schema, causal):
    fake = Fake(schema)
    builds(**{name: fake})
    (q, k, v), scales = rows()
    out = attend(q, k, v, *scales, causal=causal, softmax_scale=0.25)
    dequantized = [
        x.float() * scale.repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None] for x, scale in zip((q, k, v), scales, strict=True)
    ]
    assert relative_error(out, exact(*dequantized, 0.25, causal)) <= 2**-8
    [given] = fake.calls
    assert (given["is_causal"], given["softmax_scale"]) == (causal, 0.25)
    asked = {"q", "k", "v", "out", "q_descale", "k_descale", "v_descale", "is_causal", "softmax_scale", "max_seqlen_q", "max_seqlen_k"}
    asked |= {"cu_seqlens_q", "cu_seqlens_k"} if name == "vllm" else {"max_seqlen_q", "max_seqlen_k"}
    rest = {key: x for key, x in given.items() if key not in asked}
    neutral = {
        "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "attention_chunk": 0, "num_splits": 0, "sm_margin": 0,
        "is_rotary_interleaved": False, "cp_world_size": 1, "cp_rank": 0,
    }  # fmt: skip
    assert rest == {key: neutral.get(key) for key in rest}
    if name == "vllm":
        assert given["cu_seqlens_q"].tolist() == [0, 7, 14] and given["cu_seqlens_k"].tolist() == [0, 19, 38]


def test_scales_may_be_left_out(builds):
    builds(vllm=Fake(VLLM))
    (q, k, v), _ = rows()
    assert relative_error(attend(q, k, v, causal=False, softmax_scale=1.0), exact(q, k, v, 1.0, False)) <= 2**-8


def test_the_output_may_lie_in_any_order(builds):
    """vLLM's build writes sequences one after another; where they lie otherwise they are copied there."""
    builds(vllm=Fake(VLLM))
    (q, k, v), _ = rows()
    out = torch.full(q.shape, torch.nan, dtype=torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2)
    fa3.attention(q, k, v, causal=False, softmax_scale=1.0, out=out)
    assert torch.equal(out, attend(q, k, v, causal=False, softmax_scale=1.0))


def test_builds_are_chosen_in_order(builds):
    fakes = {"vllm": Fake(VLLM), "fa3_fwd_interface": Fake(UPSTREAM)}
    builds(**fakes)
    assert fa3.default().name == "fa3_fwd_interface"
    with pytest.raises(LookupError, match="not installed"):
        fa3.find("flash_attn_interface")
    (q, k, v), _ = rows()
    attend(q, k, v, causal=True, softmax_scale=1.0, build=fa3.find("vllm"))
    assert [len(fake.calls) for fake in fakes.values()] == [1, 0]


def test_a_build_with_arguments_unknown_is_refused(builds):
    builds(vllm=Fake(VLLM + ", int phase_of_the_moon"))
    with pytest.raises(LookupError, match="has an argument 'phase_of_the_moon'"):
        fa3.default()


def test_a_library_is_loaded_without_its_package(builds, monkeypatch, tmp_path):
    """And one that does not load, or registers something else, says so; what is not found is looked for again."""
    package = tmp_path / "fp8attn_fake_fa3"
    builds()
    monkeypatch.setattr(fa3, "BUILDS", {"vllm": ("fp8attn_test_late", "fp8attn_fake_fa3", "inner/_C*.so")})
    with pytest.raises(LookupError, match=r"no FlashAttention-3 is installed \(pip install fa3-fwd"):
        fa3.default()
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "inner/_C.abi3.so").write_bytes(b"no library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LookupError, match=r"vllm: .*_C\.abi3\.so does not load with torch"):
        fa3.default()
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    with pytest.raises(LookupError, match="registers no fp8attn_test_late::fwd"):
        fa3.default()
    library = torch.library.Library("fp8attn_test_late", "DEF")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: library.define(f"fwd({UPSTREAM}) -> Tensor[]"))
    assert fa3.default().name == "vllm"


def test_reasons(builds, monkeypatch):
    builds()
    assert fa3.unsupported_reason("cpu") == "FlashAttention-3 is for NVIDIA GPUs, not cpu"
    assert fa3.unsupported_reason("cuda") == "PyTorch finds no GPU" or torch.cuda.is_available()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (10, 0))
    assert "compute capability 9.0), not 10.0" in fa3.unsupported_reason("cuda")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert "not torch.float32" in fa3.unsupported_reason("cuda", torch.float32)
    assert "pip install fa3-fwd" in fa3.unsupported_reason("cuda")
    builds(vllm=Fake(VLLM))
    assert fa3.unsupported_reason("cuda", torch.float16) is None


# How they sum

LENGTHS = (1024, 8192, 32768)


@pytest.mark.parametrize(("levels", "schema", "name"), [(1, UPSTREAM, "fa3_fwd_interface"), (2, UPSTREAM, "flash_attn_interface")])
def test_the_probe_tells_one_level_from_two(builds, levels, schema, name, monkeypatch):
    builds(**{name: Fake(schema, levels)})
    monkeypatch.setattr(accumulation, "QUERIES", 1)
    monkeypatch.setattr(accumulation, "HEADS", 2)
    found = measure(accumulation.kernels()[f"FlashAttention-3 ({name})"], "cpu", LENGTHS)
    assert found.levels == levels
    errors = list(found.errors.values())
    if levels == 1:
        assert found.hurts_from == 8192
        assert errors == pytest.approx([0.0019, 0.1188, 0.4838], rel=0.02)  # as measured of fa3-fwd on an H100
        assert str(found).startswith("single-level: hurts from 8,192 tokens where V has a mean (1")
    else:
        assert found.hurts_from is None and max(errors) < 3e-3
        assert str(found) == f"two-level: {errors[-1]:.2%} off at 32,768 tokens"


def test_the_exact_reference_is_two_level():
    """Our op, as the probe calls it, on the CPU's reference."""
    from fp8attn import scaled_dot_product_attention_quantized

    found = measure(lambda q, k, v: scaled_dot_product_attention_quantized(q[:, :1, :1], k, v).expand(q.shape), "cpu", (256, 1000))
    assert found.levels == 2 and max(found.errors.values()) < 2e-3


def test_what_is_said():
    found = Accumulation({1024: 0.004, 2048: 0.03, 8192: 0.12, 131072: 0.65})
    assert (found.levels, found.hurts_from) == (1, 2048)
    assert str(found) == "single-level: hurts from 2,048 tokens where V has a mean (3.0% at 2,048, 12.0% at 8,192, 65.0% at 131,072)"
    assert str(Accumulation({1024: 0.002, 131072: 0.05})).endswith("from 131,072 tokens where V has a mean (5.0% at 131,072)")
    assert "fp8attn hopper" in accumulation.kernels()
