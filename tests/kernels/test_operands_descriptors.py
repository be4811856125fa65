"""Descriptors of wgmma are computed by 64-bit sums, with the values that they had."""

import random
import re

import pytest

from fp8attn.kernels.operands import wide_descriptors

K, V = 0x4000004000010000, 8 << 32  # constants of a descriptor: of K, and of V, whose first distance is 1 << 22
SIGNED = 0x8000002000000000 - (1 << 64)


def product(descriptor: str) -> str:
    return f"wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {{%r90,%r91}}, %rd1, {descriptor}, 0, 1, 1;"


# As Triton 3.9 writes it: K's descriptors, and two slices of V, from the address of a stage in %r1.
TEXT = "\n".join([
    ".reg .b64 %rd<40>;", "$L__BB0_1:",
    "add.s32 \t%r2, %r1, 49152;", "bfe.u32 \t%r3, %r2, 4, 15;",
    "cvt.u64.u32 \t%rd10, %r3;", f"or.b64 \t%rd11, %rd10, {K};", product("%rd11"),
    "add.s32 %r4, %r3, 2;", "cvt.u64.u32 %rd12, %r4;", f"or.b64 %rd13, %rd12, {K};", product("%rd13"),
    "add.s32 %r5, %r1, 98304;", "bfe.u32 %r6, %r5, 4, 15;",
    "or.b32 %r7, %r6, 4194304;", "cvt.u64.u32 %rd14, %r7;", f"or.b64 %rd15, %rd14, {V};", product("%rd15"),
    "add.s32 %r8, %r6, 4194432;", "cvt.u64.u32 %rd16, %r8;", f"or.b64 %rd17, %rd16, {V};", product("%rd17"),
    "add.s32 %r9, %r1, 106496;", "bfe.u32 %r10, %r9, 4, 15;",
    "or.b32 %r11, %r10, 4194304;", "cvt.u64.u32 %rd18, %r11;", f"or.b64 %rd19, %rd18, {V};", product("%rd19"),
    "add.s32 %r12, %r1, 512;", "bfe.u32 %r13, %r12, 4, 15;",
    "add.s32 %r14, %r13, 4;", "cvt.u64.u32 %rd20, %r14;", f"or.b64 %rd21, %rd20, {SIGNED};", product("%rd21"),
    "ret;",
])  # fmt: skip


def descriptors(ptx: str, address: int) -> list[int]:
    """What the products of a text read, by its arithmetic."""
    values, found = {"%r1": address}, []

    def number(x: str) -> int:
        return values[x] if x.startswith("%") else int(x)

    for line in re.split(r"\n|(?<=;) (?=\w)", ptx):
        if read := re.search(r"%rd1, (%rd\d+), 0, 1, 1;", line):
            found.append(values[read[1]])
        elif made := re.fullmatch(r"(\w+)\.\w+(?:\.u32)?\s+(%\w+), (.*);", line.strip()):
            a, *rest = (number(x) for x in made[3].split(", "))
            bits = 64 if made[2].startswith("%rd") else 32
            known = {"add": lambda a, b: a + b, "or": lambda a, b: a | b, "mov": lambda a: a, "cvt": lambda a: a}
            known["bfe"] = lambda a, start, count: a >> start & (1 << count) - 1
            values[made[2]] = known[made[1]](a, *rest) % (1 << bits)
    return found


def test_every_descriptor_keeps_its_value():
    wide = wide_descriptors(TEXT)
    addresses = [0, 1024, 232448 - 106496 - 8192, *(random.Random(0).randrange(0, 120_000, 16) for _ in range(100))]
    for address in addresses:
        assert descriptors(wide, address) == descriptors(TEXT, address)
    assert len(descriptors(TEXT, 0)) == 6 and descriptors(TEXT, 16)[0] == K + 3073


def test_slices_of_a_tile_share_a_descriptor():
    wide = wide_descriptors(TEXT)
    assert wide.count("or.b64") == 3, "one of K, one of V, one of a tile with a sign"
    base = re.search(rf"or\.b64 (%rd\d+), %rd\d+, {V};", wide)[1]
    sums = dict(re.findall(rf"add\.s64 (%rd\d+), {base}, (\d+);", wide))
    assert sums == {"%rd15": "4194304", "%rd17": "4194432", "%rd19": str(4194304 + 8192 // 16)}
    assert ".reg .b64 %rd<46>;" in wide


def test_a_text_of_sums_is_unchanged():
    assert wide_descriptors(wide_descriptors(TEXT)).count("add.s64") == wide_descriptors(TEXT).count("add.s64")
    assert wide_descriptors("ret;") == "ret;"


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ("%r4, %r3, 2;", "%r4, %r3, 2;\n@%p1 add.s32 %r4, %r3, 4;", "%rd13"),  # two writes
        ("%r4, %r3, 2;", "%r4, %r3, 2;\n{ .reg .b32 a; mov.b32 %r4, a; }", "%rd13"),
        ("%r3, %r2, 4, 15;", "%r3, %r2, 4, 18;", "%rd13"),  # the field may reach the constants
        ("%r4, %r3, 2;", "%r4, %r3, 65536;", "%rd13"),  # the distance does
        ("or.b32 %r7, %r6, 4194304;", "or.b32 %r7, %r6, 4194306;", "%rd15"),  # no sum
    ],
)
def test_what_is_no_such_sum_is_left(before, after, kept):
    assert before in TEXT
    wide = wide_descriptors(TEXT.replace(before, after))
    assert re.search(rf"or\.b64\s+{kept}, ", wide) and not re.search(rf"(add\.s64|mov\.b64)\s+{kept}, ", wide)


@pytest.mark.parametrize(("before", "after"), [
    ("add.s32 %r9", "$L__BB0_2:\nadd.s32 %r9"),  # another way may lead to the second slice
    ("%r1, 106496;", "%r1, 106500;"),  # no whole number of the field's units
    ("%r1, 106496;", "%r1, 90112;"),  # before the first
    ("%r1, 106496;", "%r15, 106496;"),  # of another address
])  # fmt: skip
def test_slices_that_cannot_share_have_their_own(before, after):
    assert before in TEXT
    assert wide_descriptors(TEXT.replace(before, after)).count("or.b64") == 4
