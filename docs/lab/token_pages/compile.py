"""The machine code of decode over both forms of pages, without a GPU: `python -m docs.lab.token_pages.compile`."""

from __future__ import annotations

import re
import sys
from collections import Counter

import torch

from fp8attn import AttentionParams, KVPages
from fp8attn.kernels import decode
from fp8attn.kernels.decode import plan
from fp8attn.kernels.launch import Launch
from tests.support.machine_code import Built, Sass, build, dry

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
        token_decode(q, store(torch.randn(200, 1, head_dim), torch.randn(200, 1, head_dim), [200]), params)
    return dict(zip(("product", "token"), found, strict=True))


def page_loop(sass: Sass) -> list[str]:
    """The instructions of the loop over pages: the shortest loop with a product and a wait for an mbarrier."""
    loops = [sass.code[a : b + 1] for a, b in sass.loops()]
    return min((x for x in loops if any("MMA" in i for i in x) and any("SYNCS" in i for i in x)), key=len)


def facts(built: Built) -> str:
    sass = built.sass()
    loop = page_loop(sass)
    kinds = Counter(re.match(r"(?:@\S+\s+)?(\w+)", i)[1] for i in loop)
    spills = sum("STL" in i or "LDL" in i for i in loop)
    return (f"loop {len(loop)}, spills {spills} ({built.spill_stores} B), registers {built.registers}, shared {built.kernel.metadata.shared}, all {len(sass.code)}; "
            + ", ".join(f"{name} {count}" for name, count in kinds.most_common(22)))  # fmt: skip


def main() -> None:
    for name, case in CASES.items():
        if all(word in name for word in sys.argv[1:]):
            for form, made in launches(*case).items():
                built = build(made)
                print(name, form, facts(built), flush=True)
                if len(sys.argv) > 1:
                    open(f"/tmp/tokens_{form}.sass", "w").write("\n".join(page_loop(built.sass())))
                    open(f"/tmp/tokens_{form}.ptx", "w").write(built.kernel.asm["ptx"])


if __name__ == "__main__":
    main()
