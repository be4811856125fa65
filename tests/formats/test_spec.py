"""What follows from a spec: names, layouts and refusals."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

import fp8attn
from fp8attn import KVPages, PagedKVCache, UsageError
from fp8attn._torch_ops import resolve
from fp8attn.formats.codec import CODECS, E4M3, INT8
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.spec import HEAD_DIMS, RANKS, ROPE_IN_CODES, ROPES, SPARE, SPECS, PageSpec, spec_of

LATENT = PageSpec.latent(512, 64)


def test_pages_that_exist_have_names_and_layouts():
    assert len(SPECS) == len(HEAD_DIMS) * len(CODECS) + len(RANKS) * len(ROPES) + 2
    for name, spec in SPECS.items():
        assert spec.name == name and spec_of(name) is spec and spec.refusal is None and PageSpec.of(spec) is spec
        if spec.v_in_k:
            continue
        assert PageSpec.of(spec.k_dim, spec.k.name) is spec and spec.v is E4M3
        header = 128 * max(1, spec.k_dim // 256)
        assert spec.layout.nbytes == 256 * spec.k_dim + header and spec.layout.v_offset == 128 * spec.k_dim
        assert spec.widths == (spec.k_dim, spec.k_dim)
    assert PageSpec.of(64).name == "k64.int8-v64.e4m3"


def test_pages_of_latents():
    """Each part begins at a multiple of 128 bytes, and a token of DeepSeek's 512 + 64 channels has 644 bytes."""
    assert PageSpec(576, 512, INT8, v_in_k=True) == LATENT
    assert LATENT.name == "k576.int8-v512.int8-v_in_k-token_scales" and LATENT.layout.token_bytes == 644
    assert LATENT.widths == (512, 64)
    for rank in RANKS:
        for rope in ROPES:
            spec = PageSpec.latent(rank, rope)
            layout = spec.layout
            offsets = layout.k_offset, layout.v_offset, layout.header_offset, layout.nbytes
            assert offsets == (0, 128 * rank, 128 * (rank + 2 * rope), 128 * (rank + 2 * rope + 4))
            assert layout.v_bytes == 256 * rope
    with pytest.raises(UsageError, match=r"pages k576\.int8.* have no key_dtype='e4m3': leave it out"):
        PagedKVCache(1, LATENT, key_dtype="e4m3")


def test_blocks_of_an_engine_beside_k_and_v():
    """Three pages are as long as two of head_dim 512 and four of 256. No part is elsewhere than without spare bytes."""
    plain, spec = (PageSpec.latent(*ROPE_IN_CODES, rope_in_codes=True, spare=spare) for spare in (0, SPARE))
    assert (plain.layout.token_bytes, spec.layout.token_bytes) == (644, 684)
    assert 3 * spec.layout.nbytes == 2 * PageSpec.of(512).layout.nbytes == 4 * PageSpec.of(256).layout.nbytes
    assert replace(spec.layout, nbytes=plain.layout.nbytes) == plain.layout and spec.widths == plain.widths


def test_specs_are_keys():
    """Equal specs are one key, also after a copy, and specs that differ in one attribute are others."""
    spec = PageSpec.of(64)
    assert (
        {spec: 1}[PageSpec(64, 64, INT8)]
        == {spec: 1}[pickle.loads(pickle.dumps(spec))]
        == {spec: 1}[copy.deepcopy(spec)]
        == 1
    )
    changes = {"k_dim": 80, "v_dim": 80, "k": E4M3, "v_in_k": True, "rope_in_codes": True, "spare": 8}
    assert len({spec, *(replace(spec, **{name: value}) for name, value in changes.items())}) == 7
    assert len({replace(spec, **{name: value}).name for name, value in changes.items()}) == 6


REFUSAL = r"there are no pages|head_dim must be one of \(64, 80, 96, 128, 192, 256, 512\); got"


@pytest.mark.parametrize(
    "spec",
    [PageSpec.latent(384, 64), PageSpec.latent(512, 16), PageSpec(128, 64, INT8), PageSpec.of(72), PageSpec.of(64.0)],
    ids=lambda spec: spec.name,
)
def test_a_format_of_pages_that_do_not_exist_is_refused(spec):
    pages = KVPages.empty(1, 1, 64, num_seqs=1, max_pages=1)
    for door in (
        lambda: replace(pages, format=KVFormat(spec.name)),
        lambda: spec.layout,
        lambda: spec_of(spec.name),
        lambda: resolve("auto", pages.k_scale, spec),
    ):
        with pytest.raises(UsageError, match=REFUSAL):
            door()


@pytest.mark.parametrize("head_dim", [72, 576])
def test_a_head_dim_without_pages_is_refused(head_dim):
    x = torch.zeros(1, 1, 9, head_dim)
    for door in (
        lambda: KVPages.empty(1, 1, head_dim, num_seqs=1, max_pages=1),
        lambda: PagedKVCache(1, head_dim),
        lambda: fp8attn.select_backend("reference", "cpu", torch.float32, head_dim),
        lambda: fp8attn.from_dense(x, x),
    ):
        with pytest.raises(
            UsageError,
            match=rf"head_dim must be one of .*; got {head_dim}$|cannot run here: head_dim must .*{head_dim}$",
        ):
            door()
    assert fp8attn.unsupported_reason("auto", "cpu", torch.float32, head_dim) == PageSpec.of(head_dim).refusal
