"""Places of engines on a machine with two GPUs, one GPU and none. Engines are functions that wait."""

import threading

import pytest

from benchmarks import at_once, vllm
from benchmarks.at_once import Engine, Machine

TIMED = [Engine("throughput", (str(i),), timed=True) for i in range(3)]
SMALL = [Engine("answers", (str(i),)) for i in range(20)]
WIDE = Engine("answers", ("tp2",), gpus=2)


class Running:
    """The engines that run, and their places; `end` ends one."""

    def __init__(self, monkeypatch):
        self.places, self.events = {}, {}
        monkeypatch.setattr(at_once, "run", self.run)

    def run(self, engine, place):
        self.events[engine] = threading.Event()
        self.places[engine] = place
        assert self.events[engine].wait(10)
        return [{"engine": str(engine)}]

    def end(self, machine, engine):
        while engine not in self.places:
            pass
        self.events[engine].set()
        assert machine.submit(engine).result(10) == [{"engine": str(engine)}]
        del self.places[engine]

    def settle(self, machine, count):
        """Wait until so many engines run; no more do."""
        for _ in range(2000):
            if len(self.places) == count == len(machine._running):
                return
            threading.Event().wait(0.002)
        raise AssertionError((count, self.places))


@pytest.fixture
def running(monkeypatch):
    return Running(monkeypatch)


def test_timed_engines_are_alone_and_others_share(running):
    machine = Machine(2, range(32))
    for engine in (*TIMED, WIDE, *SMALL):
        machine.submit(engine)
    running.settle(machine, 2)  # the third timed one waits, and nothing else may use its GPUs
    assert [running.places[engine].gpus for engine in TIMED[:2]] == [(0,), (1,)]
    assert len({core for engine in TIMED[:2] for core in running.places[engine].cores}) == 2 * at_once.TIMED_CORES
    running.end(machine, TIMED[1])
    running.settle(machine, 2)  # it takes what is free first
    assert running.places[TIMED[2]].gpus == (1,)
    running.end(machine, TIMED[2])
    running.settle(machine, 1 + at_once.MOST)  # small ones beside the timed one, which keeps its GPU and cores
    small = [place for engine, place in running.places.items() if not engine.timed]
    assert all(place.gpus == (1,) and not {*place.cores} & {*running.places[TIMED[0]].cores} for place in small)
    running.end(machine, TIMED[0])
    running.settle(machine, len(SMALL))  # the other GPU has a place, but the wide one waits for both
    for engine in list(running.places):
        if running.places[engine].gpus == (1,):
            running.end(machine, engine)
            break
    running.settle(machine, len(SMALL))
    assert running.places[WIDE].gpus in ((0, 1), (1, 0))
    for engine in list(running.places):
        running.end(machine, engine)


@pytest.mark.parametrize(("gpus", "order"), [(0, (SMALL[0], SMALL[1], TIMED[0])), (1, (SMALL[0], TIMED[0], SMALL[1]))])
def test_small_machines(running, gpus, order):
    """One engine after another; a timed one that waits gets the GPU first."""
    machine = Machine(gpus, range(2))
    for engine in (*SMALL[:2], TIMED[0]):
        machine.submit(engine)
    for engine in order:
        running.settle(machine, 1)
        running.end(machine, engine)


def test_an_engine_that_fails_is_left_out(monkeypatch, capsys):
    def run(engine, place):
        if "fp8attn" in engine.arguments:
            raise RuntimeError(f"{engine} failed")
        return [{"mean": -2.0 if "vllm-bf16" in engine.arguments else -2.1, "tokens": 10}]

    machine = Machine(0, [0])
    monkeypatch.setattr(at_once, "run", run)
    monkeypatch.setattr(vllm, "machine", lambda: machine)
    vllm.start(["perplexity-stdlib"])
    rows = list(vllm.measure("perplexity-stdlib"))
    assert [(row["case"], row["impl"], row["over_bf16"]) for row in rows] == [
        ("perplexity-stdlib-S4096", "vllm-bf16", 0.0), ("perplexity-stdlib-S4096", "vllm-fp8", 0.105171)
    ]  # fmt: skip
    assert "perplexity-stdlib fp8attn is left out: log_likelihood fp8attn" in capsys.readouterr().out


def test_what_was_found_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("FP8ATTN_ENGINES", str(tmp_path))
    engine = Engine("answers", ("fp8attn", "plain"))
    (tmp_path / "answers-fp8attn-plain.json").write_text('[{"answers": 1}]')
    assert Machine(0, []).submit(engine).result(1) == [{"answers": 1}]
