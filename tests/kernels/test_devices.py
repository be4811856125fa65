"""The numbers of a GPU, and the fit that measures them."""

import logging

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from benchmarks import fit
from fp8attn.kernels import devices
from fp8attn.kernels.devices import H100, H200, Chip, Cost
from fp8attn.kernels.launch import recording
from fp8attn.kernels.prefill import cut, plan


def test_chips_are_known_by_name(caplog):
    with caplog.at_level(logging.DEBUG, devices.__name__):
        assert devices.named("NVIDIA H100 80GB HBM3") is H100
        assert devices.named("NVIDIA H200") is H200
    assert not caplog.records


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 PCIe", "NVIDIA H20", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_others_have_the_default_s_numbers_and_say_so(name, caplog):
    with caplog.at_level(logging.DEBUG, devices.__name__):
        assert devices.named(name) is H100
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert name in record.getMessage() and H100.name in record.getMessage() and "benchmarks.fit" in record.getMessage()


def test_without_a_gpu_the_default_is_planned_for():
    assert devices.chip(torch.device("cpu")) is devices.DEFAULT


def test_a_fit_finds_the_numbers_of_prefill():
    """Noise of 2% moves the time of a tile by less than 3%, and the time of an item, a tenth of most launches, by less
    than 25%.
    """
    noise = torch.Generator().manual_seed(0)
    cases = [(items, tiles) for items in fit.HEADS for tiles in fit.TILES]
    exact = {(items, tiles): 3.0 + items * (5.9 + 1.52 * tiles) for items, tiles in cases}
    assert fit.fit_prefill(exact) == Cost(tile=1.52, item=5.9)
    noisy = {
        case: time * (1 + 0.02 * float(torch.randn((), generator=noise).clamp(-1, 1))) for case, time in exact.items()
    }
    cost = fit.fit_prefill(noisy)
    assert cost.tile == pytest.approx(1.52, rel=0.03) and cost.item == pytest.approx(5.9, rel=0.25)


def test_every_cta_has_as_many_items_and_tiles_as_the_fit_counts(monkeypatch):
    sms, shape = 3, cut.SHAPES[128][1]
    monkeypatch.setattr(plan, "num_sms", lambda device: sms)
    calls = dict(fit.prefill_calls(128, shape.rows * sms))
    with fit.only(shape), recording(dry=True) as launches:
        for call in calls.values():
            call()
    assert [launch.grid for launch in launches] == [(sms,)] * len(calls)
    for (items, tiles), launch in zip(calls, launches, strict=True):
        options, arguments = launch.constants["OPTIONS"], dict(zip(launch.kernel.arg_names, launch.args, strict=False))
        assert options.partitions == 3 and not options.split and not arguments["causal"]
        assert arguments["num_q_heads"] * -(-arguments["max_q"] // shape.rows) == items * sms
        assert arguments["table_width"] == tiles and arguments["lengths_ptr"].tolist() == [128 * tiles]


def test_a_fit_finds_the_numbers_of_combine():
    sizes = [4 * splits * tokens * fit.Q_HEADS * fit.HEAD_DIM for splits in fit.SPLITS for tokens in fit.TOKENS]
    assert len(set(sizes)) == len(sizes)
    assert fit.fit_combine({size: 6.0 + 0.9e-6 * size for size in sizes}) == (6.0, 0.9e-6)


def test_an_entry_is_ready_to_be_pasted():
    again = eval(fit.entry(H200), {"Chip": Chip, "Cost": Cost})
    assert vars(again) == vars(H200)
