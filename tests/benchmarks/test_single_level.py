"""The script for the kernels' maintainers, as far as it needs no GPU."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import single_level
from fp8attn.numerics import relative_error


def test_it_is_one_file_that_needs_torch_alone():
    tree = ast.parse(Path(single_level.__file__).read_text())
    names = {node.module.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert names - sys.stdlib_module_names == {"torch"}


def test_the_error_is_of_the_bytes_that_the_kernel_gets():
    q, rows = single_level.inputs(200, 3, 1.0, "cpu")
    want = single_level.exact(q, rows)
    assert rows[:, : single_level.RANK].float().mean() == pytest.approx(1, abs=0.02)

    def attend(queries, cache, lengths, table):
        assert queries.shape == (5, 1, 3, 576) and cache.shape == (4, 64, 1, 576) and lengths.tolist() == [200] * 5
        stored = cache.view(torch.uint8)[table[4].long()].view(rows.dtype).flatten(0, 2)
        out = single_level.exact(queries[4, 0], stored[: lengths[4]])
        return (1.25 * out).expand(5, 1, -1, -1)

    assert single_level.error(attend, q, rows, 5, want) == pytest.approx(0.25)
    exact = lambda queries, *_: want.expand(len(queries), 1, -1, -1)  # noqa: E731
    assert single_level.error(exact, q, rows, 66, want) == 0


@pytest.mark.parametrize(("length", "expected"), [(1024, 0.002), (2048, 0.009), (4096, 0.042)])
def test_a_sum_in_the_tensor_core_loses_what_was_measured(length, expected):
    """With equal weights and values of mean 1 and deviation 1/2, which docs/numerics.md has for one part."""
    torch.manual_seed(0)
    rows = torch.zeros(length, 576)
    rows[:, :512] = 1 + 0.5 * torch.randn(length, 512)
    rows = rows.to(torch.float8_e4m3fn)
    q = torch.zeros(2, 576)
    exact = rows[:, :512].double().mean(0).expand(2, -1)
    alone, shared = (relative_error(single_level.emulated(q, rows, 1.0, parts), exact) for parts in (1, 16))
    assert alone == pytest.approx(expected, abs=0.0015) and shared < 0.0015


@pytest.mark.parametrize(("mean", "expected"), [(1.0, 0.10), (0.3, 0.033), (0.0, 0.014)])
def test_the_rule_predicts_the_kernel(mean, expected):
    """vLLM's FP8 kernel on an H200, 66 requests of 8,192 tokens: 10%, 3.3% and 1.4% (docs/single-level-sums.md)."""
    q, rows = single_level.inputs(8192, single_level.EMULATED, mean, "cpu")
    predicted = single_level.emulated_error(q, rows, 1, single_level.exact(q, rows))
    assert predicted == pytest.approx(expected, rel=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_emulates():
    command = [sys.executable, single_level.__file__, "--tokens", "4096"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed[0].startswith("no Hopper GPU, so nothing is measured") and printed[2].endswith("emulated")
    assert [line.split()[0] for line in printed[3:8]] == ["1", "2", "8", "22", "66"]
    assert float(printed[7].split()[-1].rstrip("%")) > 3 > 1 > float(printed[3].split()[-1].rstrip("%"))
