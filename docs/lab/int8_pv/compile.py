"""The machine code of every variant, without a GPU: `python -m docs.lab.int8_pv.compile [words]`."""

from __future__ import annotations

import sys

import torch

from fp8attn.kernels.prefill import plan
from tests.kernels.prefill.compile_prefill import hot_loop
from tests.support.machine_code import Built, build, dry

from .host import VARIANTS, Variant, call, store, unsigned


def made(variant: Variant, tokens: int = 256, heads: tuple[int, int] = (4, 2), q_len: int = 0, sms: int = 132):
    torch.manual_seed(0)
    with dry() as (launches, patch):
        patch.setattr(plan, "num_sms", lambda device: sms)
        k, v = torch.randn(2, 1, tokens, heads[1], 128)
        q = torch.randn(1, q_len or tokens, heads[0], 128).bfloat16()
        call(q, store(k, v, variant), variant, True, torch.empty_like(q))
    return launches[0]


def facts(built: Built) -> dict:
    sass = built.sass()
    loop, spills, barriers = hot_loop(sass)
    return {"loop": loop, "loop spills": spills, "barriers": barriers, "registers": built.registers, "spilled bytes": built.spill_stores,
            "instructions": len(sass.code), "C75xx": built.warnings, "unset": sass.unset_register(),
            "overwritten": sass.overwritten_operand(), "operands": getattr(built.kernel.metadata, "fp8attn_operands", "")}  # fmt: skip


def main() -> None:
    for name, variant in VARIANTS.items():
        if all(word in name for word in sys.argv[1:]):
            with unsigned():
                built = build(made(variant))
            print(name, facts(built), flush=True)
            if len(sys.argv) > 1:
                from pathlib import Path

                Path("/tmp/i8_kernel.ptx").write_text(built.kernel.asm["ptx"])
                Path("/tmp/i8_kernel.sass").write_text("\n".join(built.sass().code))


if __name__ == "__main__":
    main()
