"""Copies of wgmma's left operands are removed from PTX where that changes no value, and only for the kernel that asks
for it.
"""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from tests.support import compiling

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from triton import knobs

from fp8attn.kernels import operands
from fp8attn.kernels.operands import Unsafe, ptxas_release, without_copies

PRODUCT = "wgmma.mma_async.sync.aligned.m64n{}k32.f32.e4m3.e4m3 {{%r90,%r91}}, {{{}}}, %rd1, 0, 1, 1;"
WAIT, COMMIT = "wgmma.wait_group.sync.aligned {};", "wgmma.commit_group.sync.aligned;"


def copy(target: int, source: int) -> str:
    return f"// begin inline asm\n.loc 1 2 3\nmov.b32 %r{target}, %r{source};\n// end inline asm"


# Sums of weights and a product with V, of the same weights in registers 1 and 2.
TEXT = "\n".join([
    "cvt.u32.u16 %r1, %rs1;", "cvt.u32.u16 %r2, %rs2;",
    copy(11, 1), copy(12, 2), PRODUCT.format(8, "%r11,%r12"), COMMIT,
    copy(21, 1), copy(22, 2), PRODUCT.format(128, "%r21,%r22"), COMMIT,
    WAIT.format(1), WAIT.format(0), "add.s32 %r1, %r5, %r6;", "$L__BB0_1:", "ret;",
])  # fmt: skip


def operands_of(ptx: str) -> list[str]:
    return re.findall(r"\}, \{([^}]*)\}", ptx)


def test_products_read_what_was_copied():
    direct = without_copies(TEXT)
    assert operands_of(direct) == ["%r1,%r2", "%r1,%r2"] and "mov.b32" not in direct
    assert [line for line in TEXT.split("\n") if "wgmma.mma" not in line and "mov" not in line] == [
        line for line in direct.split("\n") if "wgmma.mma" not in line
    ]


def test_only_sums_may_read_directly():
    direct = without_copies(TEXT, "sums")
    assert operands_of(direct) == ["%r1,%r2", "%r21,%r22"] and direct.count("mov.b32") == 2


def test_text_without_copies_is_unchanged():
    direct = without_copies(TEXT)
    assert without_copies(direct) == direct
    moved = TEXT.replace("// begin inline asm\n", "")  # moves of the compiler's own
    assert without_copies(moved) == moved


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (WAIT.format(1), "add.s32 %r9, %r11, %r6;\n" + WAIT.format(1), "another reader"),
        (WAIT.format(1), "add.s32 %r2, %r5, %r6;\n" + WAIT.format(1), "%r2 is written while a product reads it"),
        (WAIT.format(0), "{ .reg .b32 a; mov.b32 a, 0; mov.b32 %r1, a; }\n" + WAIT.format(0), "%r1 is written"),
        (WAIT.format(0), "ld.shared.v2.b32 {%r3, %r2}, [%r7];\n" + WAIT.format(0), "%r2 is written"),
        (COMMIT, "$L__BB0_9:\n" + COMMIT, "the code branches"),
        (COMMIT, "@%p1 bra $L__BB0_1;\n" + COMMIT, "the code branches"),
        (copy(11, 1), copy(11, 1) + "\n" + copy(11, 1), "copied to twice"),
        (copy(21, 1), "", "not made before it"),
    ],
)
def test_copies_that_are_needed_are_refused(before, after, reason):
    text = TEXT.replace(before, after, 1)
    if not after:  # the product comes first
        text = text.replace(WAIT.format(0), WAIT.format(0) + "\n" + before)
    with pytest.raises(Unsafe, match=reason):
        without_copies(text)


def test_release_of_ptxas():
    assert ptxas_release("Cuda compilation tools, release 13.4, V13.4.59") == (13, 4)
    assert ptxas_release("something else") == ()


@pytest.fixture
def knob(monkeypatch):
    """Triton's hook, as another library had set it: `knob.add_stages_inspection_hook`."""

    def theirs(*args):
        return None if args else ("theirs", "theirs")

    monkeypatch.setattr(operands, "copies_operands", lambda: True)
    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = theirs
        yield knobs.runtime
        assert operands._inside == 0


def test_a_hook_that_another_library_sets_meanwhile_stays(knob):
    with operands.direct_operands("all"):
        ours = knob.add_stages_inspection_hook
        assert ours() == ("theirs" + operands.KEY + "all",) * 2

        def around(*args):  # as a library does that keeps the hook it finds
            return ours(*args)

        knob.add_stages_inspection_hook = around
    assert knob.add_stages_inspection_hook is around and around() == ("theirs", "theirs")
    with operands.direct_operands("sums"):
        assert operands.KEY + "sums" in knob.add_stages_inspection_hook()[0]
    assert knob.add_stages_inspection_hook is around


def test_a_hook_of_ours_that_comes_back_late_goes_with_the_next_use(knob):
    theirs = knob.add_stages_inspection_hook
    with operands.direct_operands("all"):
        ours = knob.add_stages_inspection_hook
    knob.add_stages_inspection_hook = ours  # another library had kept it
    assert ours() == ("theirs", "theirs")
    with operands.direct_operands("all"):
        assert ours() == ("theirs" + operands.KEY + "all",) * 2
    assert knob.add_stages_inspection_hook is theirs


def test_threads_that_come_and_go_leave_the_hook_of_another_library(knob):
    """Threads outside always see that library's key, and threads inside see their own, too."""
    theirs, wrong, done = knob.add_stages_inspection_hook, [], Event()

    def inside(which):
        for _ in range(2000):
            with operands.direct_operands(which):
                key, _ = knob.add_stages_inspection_hook()
                if key != "theirs" + operands.KEY + which:
                    wrong.append(key)

    def outside():
        while not done.is_set():
            key, _ = knob.add_stages_inspection_hook()
            if key != "theirs":
                wrong.append(key)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(5) as pool:
            watching = [pool.submit(outside) for _ in range(2)]
            for job in [pool.submit(inside, which) for which in ("all", "sums", "all")]:
                job.result()
            done.set()
            for job in watching:
                job.result()
    finally:
        done.set()
        sys.setswitchinterval(interval)
    assert not wrong and knob.add_stages_inspection_hook is theirs


@pytest.fixture(scope="module")
def found():
    return json.loads(compiling.run("-m", "tests.kernels.run_operands"))


@pytest.mark.slow
@pytest.mark.skipif(not operands.copies_operands(), reason="this Triton makes no copies")
def test_every_way_to_compile_finds_one_kernel(found):
    """A second process, `compiled` and the first launch look for the kernel under one key. A kernel of another thread
    keeps its own.
    """
    assert found["direct"] == found["again"] and found["direct"]["note"] == "direct" and found["direct"]["copies"] == 0
    assert found["plain"]["copies"] > 0 and found["plain"]["hash"] != found["direct"]["hash"]
    assert found["other thread"] == found["without the hook"]
    assert found["compilations"] == ["compiled", "loaded"]
    assert all("wgmma" in key for key in found["side by side"])  # threads compile side by side
    assert found["hook"] is None


@pytest.mark.slow
@pytest.mark.skipif(not operands.copies_operands(), reason="this Triton makes no copies")
def test_a_text_that_fails_the_checks_is_assembled_as_triton_made_it(found):
    assert found["unsafe"]["note"] == "planted" and found["unsafe"]["copies"] == found["plain"]["copies"]
    assert "prefill is slower than it could be: planted" in found["warning"]


@pytest.mark.slow
@pytest.mark.skipif(not operands.copies_operands(), reason="this Triton makes no copies")
def test_an_old_ptxas_merges_the_copies(found):
    assert found["old ptxas"] == {"note": "direct", "copies": found["plain"]["copies"]}


def test_products_of_registers_become_unsigned():
    """Those whose left operand is in shared memory stay signed. A text without any is refused: its products are written
    in a way that is not known."""
    registers = "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {%r1,%r2}, {%r3,%r4}, %rd1, 1;"
    shared = "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {%r1,%r2}, %rd2, %rd1, 1;"
    assert operands.unsigned_products(f"{registers}\n{shared}") == f"{registers.replace('s8.s8', 'u8.u8')}\n{shared}"
    with pytest.raises(ValueError, match="no product of INT8 registers"):
        operands.unsigned_products(shared)
