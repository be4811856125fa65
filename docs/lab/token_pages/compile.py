"""The machine code of decode over both forms of pages, of the copy and of both appends, without a GPU:
`python -m docs.lab.token_pages.compile`."""

from __future__ import annotations

import re
import sys
from collections import Counter

import torch

from fp8attn import AttentionParams, KVPages
from fp8attn.kernels import append as kernels_append
from fp8attn.kernels import decode
from fp8attn.kernels.decode import plan
from fp8attn.kernels.launch import Launch
from fp8attn.params import Append
from tests.support.machine_code import Built, Sass, build, dry

from .append import append
from .copy import copy, target_of
from .decode import token_decode
from .layout import store

CASES = {f"D{d} rows{rows}": (d, rows) for d in (64, 128, 256) for rows in (4, 16)}


def launches(head_dim: int, group: int) -> dict[str, Launch]:
    torch.manual_seed(0)
    params = AttentionParams(None, 1, True, head_dim**-0.5, return_lse=True)
    q = torch.randn(1, group, head_dim).bfloat16()
    with dry() as (found, patch):
        patch.setattr(plan, "num_sms", lambda device: 132)
        decode.decode_attention(q, KVPages.empty(2, 1, head_dim, 1, 2), params)
        for biased in (False, True):
            token_decode(q, store(torch.randn(200, 1, head_dim), torch.randn(200, 1, head_dim), [200]), params, biased)
    return dict(zip(("product", "token", "biased"), found, strict=True))


def others(head_dim: int) -> dict[str, Launch]:
    """The copy and the appends."""
    k = torch.randn(200, 1, head_dim).bfloat16()
    held = store(k, k, [200])
    with dry() as (found, patch):
        patch.setattr(kernels_append, "num_sms", lambda device: 132)
        patch.setattr(kernels_append, "is_native", lambda device: True)
        copy(held, target_of(held, 200))
        kernels_append.append(KVPages.empty(2, 1, head_dim, 1, 2), k, k, Append(None, 200))
        append(held, k, k, 200)
    return dict(zip(("copy", "product append", "token append"), found[:3], strict=True))


def page_loop(sass: Sass) -> list[str]:
    """The instructions of the loop over pages: the shortest loop with a product and a wait for an mbarrier."""
    loops = [sass.code[a : b + 1] for a, b in sass.loops()]
    return min((x for x in loops if any("MMA" in i for i in x) and any("SYNCS" in i for i in x)), key=len)


def whole(built: Built) -> str:
    code = built.sass().code
    kinds = Counter(re.match(r"(?:@\S+\s+)?([\w.]+)", i)[1].split(".")[0] for i in code)
    wide = Counter(re.match(r"(?:@\S+\s+)?([\w.]+)", i)[1] for i in code if re.search(r"\b(LDG|STG|LDS|STS)\b", i))
    return (f"all {len(code)}, registers {built.registers}, spilled {built.spill_stores} B, shared {built.kernel.metadata.shared}; "
            + ", ".join(f"{name} {count}" for name, count in (kinds.most_common(14) + wide.most_common(8))))  # fmt: skip


def facts(built: Built) -> str:
    sass = built.sass()
    loop = page_loop(sass)
    kinds = Counter(re.match(r"(?:@\S+\s+)?(\w+)", i)[1] for i in loop)
    spills = sum("STL" in i or "LDL" in i for i in loop)
    return (f"loop {len(loop)}, spills {spills} ({built.spill_stores} B), registers {built.registers}, "
            f"shared {built.kernel.metadata.shared}, all {len(sass.code)}; "
            + ", ".join(f"{name} {count}" for name, count in kinds.most_common(22)))  # fmt: skip


def main() -> None:
    for name, case in CASES.items():
        if all(word in name for word in sys.argv[1:]):
            for form, made in launches(*case).items():
                built = build(made)
                print(name, form, facts(built), flush=True)
    for head_dim in (64, 128, 256):
        if all(word in f"other D{head_dim}" for word in sys.argv[1:]):
            for name, made in others(head_dim).items():
                print(f"D{head_dim} {name}", whole(build(made)), flush=True)


if __name__ == "__main__":
    main()
