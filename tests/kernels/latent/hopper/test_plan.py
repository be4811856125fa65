"""The plan of a launch of Hopper's kernels over latents."""

import pytest
import torch

from fp8attn.formats.spec import PageSpec

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from fp8attn.kernels.latent.hopper import plan


@pytest.mark.parametrize("max_q", [1, 4])
@pytest.mark.parametrize("heads", [16, 128])
def test_few_batches_have_all_variants(heads, max_q, monkeypatch):
    """Of any number of sequences on a GPU with 132 multiprocessors."""
    monkeypatch.setattr(plan, "num_sms", lambda device: 132)
    spec = PageSpec.latent(512, 64)
    shape = torch.device("cpu"), (9, 1, spec.layout.nbytes), spec, heads

    def variant(num_seqs):
        made = plan.make_latent_plan.__wrapped__(*shape, num_seqs * max_q, num_seqs, max_q, True, True, False)
        return id(made.round), id(made.attend), id(made.combine)

    plan.make_latent_plan.cache_clear()
    batches = plan.batches_of_variants(*shape, max_q)
    plan.make_latent_plan.cache_clear()
    assert len(batches) <= 8 and batches[0] == 1
    assert {variant(num_seqs) for num_seqs in range(1, 400)} == {variant(num_seqs) for num_seqs in batches}
