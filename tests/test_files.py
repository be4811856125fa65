"""A file that exists is replaced as a whole, or stays as it is."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from fp8attn import KVScales, LayerScales, PagedKVCache
from fp8attn.errors import UsageError
from fp8attn.files import write_whole


def test_a_failure_leaves_the_older_file(tmp_path):
    path = tmp_path / "deep" / "file.bin"
    write_whole(path, lambda draft: draft.write_bytes(b"older"))

    def fail(draft):
        draft.write_bytes(b"part")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_whole(path, fail)
    assert path.read_bytes() == b"older" and list(path.parent.iterdir()) == [path]


def test_permissions_and_links_stay(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"older")
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, lambda draft: draft.write_bytes(b"newer"))
    assert path.read_bytes() == b"newer" and path.stat().st_mode & 0o777 == 0o640 and link.is_symlink()
    for write in (
        lambda: write_whole(tmp_path, lambda draft: draft.write_bytes(b"newer")),
        lambda: saved("cache", 1).save(tmp_path),
    ):
        with pytest.raises(UsageError, match="is a folder; give the name of a file"):
            write()


def test_drafts_of_killed_writers_are_removed(tmp_path):
    """A draft that was written less than an hour ago may have a writer, and files of other names are not drafts of this
    one.
    """
    path = tmp_path / "prompt[1].bin"
    code = (
        "import os, signal, sys; from pathlib import Path; from fp8attn.files import write_whole\n"
        "write_whole(sys.argv[1], lambda draft: (draft.write_bytes(b'part'), os.kill(os.getpid(), signal.SIGKILL)))"
    )
    assert subprocess.run([sys.executable, "-c", code, path]).returncode == -signal.SIGKILL
    (killed,) = tmp_path.iterdir()
    others = [
        tmp_path / ".prompt-0123456789abcdef.bin",
        tmp_path / ".other-01234567.bin",
        tmp_path / ".prompt[1]-notes.bin",
    ]
    for other in others:
        other.touch()
        os.utime(other, (0, 0))
    write_whole(path, lambda draft: draft.write_bytes(b"newer"))
    assert {*tmp_path.iterdir()} == {killed, path, *others}
    os.utime(killed, (time.time() - 3700,) * 2)
    write_whole(path, lambda draft: draft.write_bytes(b"newest"))
    assert {*tmp_path.iterdir()} == {path, *others} and path.read_bytes() == b"newest"


@pytest.mark.parametrize("kind", ["cache", "scales"])
def test_a_full_disk_leaves_what_was_saved_before(tmp_path, kind):
    """The limit of a file's size stands for a full disk."""
    path, size = tmp_path / "saved.safetensors", 20_000
    saved(kind, 1).save(path)
    held = path.read_bytes()
    code = (
        f"import resource, signal; from tests.test_files import saved; what = saved({kind!r}, 2)\n"
        f"signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
        f"what.save({str(path)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode and "File too large" in done.stderr
    assert path.read_bytes() == held and list(tmp_path.iterdir()) == [path]


def saved(kind: str, seed: int) -> PagedKVCache | KVScales:
    """Something whose file has more than 20,000 bytes."""
    torch.manual_seed(seed)
    if kind == "cache":
        cache = PagedKVCache(2, 64)
        cache.append(0, torch.randn(300, 2, 64), torch.randn(300, 2, 64))
        return cache
    heads, dim = 64, 64
    layer = LayerScales(torch.rand(heads) + 1, torch.rand(heads) + 1, torch.randn(heads, dim), torch.randn(heads, dim))
    return KVScales({0: layer}, num_layers=1, num_kv_heads=heads, head_dim=dim)
