"""The script for the kernels' maintainers, as far as it needs no GPU."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import single_level


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
        held = cache.view(torch.uint8)[table[4].long()].view(rows.dtype).flatten(0, 2)
        out = single_level.exact(queries[4, 0], held[: lengths[4]])
        return (1.25 * out).expand(5, 1, -1, -1)

    assert single_level.error(attend, q, rows, 5, want) == pytest.approx(0.25)
    exact = lambda queries, *_: want.expand(len(queries), 1, -1, -1)  # noqa: E731
    assert single_level.error(exact, q, rows, 66, want) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs():
    ended = subprocess.run([sys.executable, single_level.__file__], capture_output=True, text=True)
    assert ended.returncode == 1 and "needs a Hopper GPU" in ended.stderr
