"""Which process compiles the kernels of an engine."""

import threading
from concurrent.futures import ThreadPoolExecutor

from fp8attn.integrations.engine import warm


def test_the_first_process_compiles_and_the_others_wait(tmp_path):
    started, finish, made = threading.Event(), threading.Event(), []

    def compile():
        made.append(threading.get_ident())
        started.set()
        assert finish.wait(10)
        return ["kernel"]

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(warm._first, tmp_path, {"head_dim": 128}, compile)
        assert started.wait(10)
        others = [pool.submit(warm._first, tmp_path, {"head_dim": 128}, compile) for _ in range(2)]
        assert not any(other.done() for other in others)
        finish.set()
        assert first.result(10) == ["kernel"] and [other.result(10) for other in others] == [None, None]
    assert len(made) == 1
    assert warm._first(tmp_path, {"head_dim": 128}, compile) is None
    assert warm._first(tmp_path, {"head_dim": 64}, compile) == ["kernel"]
