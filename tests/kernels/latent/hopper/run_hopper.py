"""The Hopper kernels of latent attention without a GPU: compiled for sm_90, and run on the CPU (`tests/emulator`).

`test_hopper.py` calls this in a process where Triton compiles. By hand:

    python -m tests.kernels.latent.hopper.run_hopper compile [case substring ...] [--table]
    python -m tests.kernels.latent.hopper.run_hopper emulate [case substring ...] [--table]
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from itertools import pairwise

import torch

from fp8attn import AttentionParams, KVPages
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.rotation import rotate, rotate_back
from fp8attn.formats.spec import PageSpec
from fp8attn.kernels.latent import hopper
from fp8attn.kernels.launch import Launch, Tiles
from tests.emulator import emulate
from tests.kernels.prefill.compile_prefill import ring_barriers
from tests.support.kernel_cases import poison_empty
from tests.support.machine_code import Sass, build, dry

PLAIN = {
    "lengths": [1], "heads": 16, "rank": 512, "rope": 64, "queries": 1, "bounds": None, "causal": True,
    "scale": 192**-0.5, "mean": 0.0, "q": 1.0, "static": False, "dtype": torch.float16, "sms": 4, "late": (),
    "broken": False, "kv_heads": 1, "in_codes": False, "pads": None, "zeros": (0, 0),
    "most_tiles": hopper.plan.MOST_TILES, "many": hopper.plan.MANY,
}  # fmt: skip
COMPILED = {
    "two digits": {},
    "two digits, drafts": {"queries": 3, "heads": 20},
    "two digits, ragged": {"bounds": [0, 1], "queries": 2},
    "two digits, rank 256, rope 32": {"rank": 256, "rope": 32, "heads": 40 // 2},
    "two digits, rope 128": {"rope": 128},
    "two digits, no rope": {"rope": 0},
    "two digits, padding": {"pads": [0]},
    "two digits, RoPE in codes": {"rope": 128, "in_codes": True, "kv_heads": 2},
    "one digit": {"heads": 128},
    "one digit, drafts": {"heads": 64, "queries": 2},
    "one digit, rank 256, rope 32": {"rank": 256, "rope": 32, "heads": 40},
    "prompt": {"queries": 1024, "heads": 16, "rope": 128, "in_codes": True, "kv_heads": 2, "lengths": [1024]},
    "prompt, padding": {
        "queries": 1024,
        "heads": 16,
        "rope": 128,
        "in_codes": True,
        "kv_heads": 2,
        "lengths": [1024],
        "pads": [3],
    },
}
EMULATED = {
    "ragged": {"lengths": [330, 0, 64, 1], "static": True, "sms": 3},
    "split": {"lengths": [1100, 65], "sms": 5, "mean": 1.0},
    "drafts": {"lengths": [67, 450, 2], "queries": 3, "heads": 20, "sms": 2, "late": (8, 9, 10, 11)},
    "drafts of several lengths": {
        "lengths": [150, 66, 40], "bounds": [0, 2, 2, 5], "queries": 3, "heads": 12, "sms": 3, "late": (0, 1, 2, 3),
    },
    "rank 256": {"lengths": [300, 129], "rank": 256, "rope": 32, "heads": 40 // 2, "dtype": torch.bfloat16},
    "rope 128": {"lengths": [200], "rope": 128, "heads": 8, "late": (12,)},
    "RoPE in codes": {
        "lengths": [300, 0, 1, 130], "rope": 128, "in_codes": True, "kv_heads": 2, "sms": 3, "late": (12,),
    },
    "padding": {"lengths": [330, 130, 64, 400], "pads": [200, 65, 64, 3], "sms": 3, "late": (0, 1)},
    "padding, drafts": {
        "lengths": [300, 129], "pads": [255, 127], "rope": 128, "in_codes": True, "kv_heads": 2, "queries": 5, "sms": 2,
    },
    "one digit, padding": {"lengths": [700, 190], "pads": [130, 70], "heads": 40, "sms": 4},
    "RoPE in codes, drafts": {
        "lengths": [67, 250], "rope": 128, "in_codes": True, "kv_heads": 2, "heads": 16, "queries": 5, "sms": 4,
        "mean": 1.0,
    },
    "one digit, RoPE in codes": {
        "lengths": [200, 70], "rope": 128, "in_codes": True, "heads": 40, "scale": -0.1, "static": True,
        "dtype": torch.bfloat16,
    },
    "no rope": {"lengths": [200], "rope": 0, "heads": 8, "scale": -0.1},
    "broken": {"lengths": [100, 65], "queries": 2, "broken": True, "sms": 1},
    "many": {"lengths": [64, 1, 0, 0, 130, 0, 66, 3], "heads": 8, "sms": 1, "late": (0, 1)},
    "one digit, many": {"lengths": [1, 0, 0, 70, 64, 0], "heads": 33, "sms": 1, "late": (8, 12)},
    "two tiles": {"lengths": [121, 121]},
    "pieces": {"lengths": [300, 200, 450], "sms": 1, "late": (0, 1, 12)},
    "one digit, pieces": {"lengths": [300, 200, 450], "heads": 33, "sms": 1, "late": (8, 9)},
    "zeros": {"lengths": [300], "heads": 8, "zeros": (0, 150)},
    "one digit, zeros": {"lengths": [400], "heads": 33, "zeros": (64, 330), "sms": 1},
    "one digit, broken": {"lengths": [40, 65], "heads": 33, "queries": 2, "broken": True, "sms": 1},
    "units that grow": {"lengths": [900], "sms": 1, "most_tiles": 4, "heads": 32, "q": 3.0},
    "one digit": {"lengths": [330, 64, 0], "heads": 64, "sms": 3},
    "one digit, mean 1": {"lengths": [700, 65], "heads": 40, "sms": 4, "mean": 1.0, "late": (8, 9, 10, 11)},
    "one digit, drafts": {
        "lengths": [66, 300], "heads": 48, "queries": 2, "sms": 4, "static": True, "dtype": torch.bfloat16,
    },
    "prompt": {
        "lengths": [150, 90], "queries": 40, "heads": 16, "kv_heads": 2, "rope": 128, "in_codes": True, "many": 256,
        "sms": 4, "static": True, "late": (0, 1),
    },
    "prompt, ragged": {
        "lengths": [70, 0, 65, 133], "bounds": [0, 33, 33, 33, 50], "queries": 33, "heads": 20, "kv_heads": 2,
        "many": 256, "sms": 4, "dtype": torch.bfloat16,
    },
    "prompt, padding": {
        "lengths": [100, 100], "pads": [70, 3], "queries": 100, "heads": 4, "kv_heads": 2, "rope": 128,
        "in_codes": True, "many": 64, "sms": 4, "late": (8, 9),
    },
    "prompt, not causal": {"lengths": [140], "queries": 40, "heads": 8, "causal": False, "many": 256, "sms": 4},
    "one digit, many rows in ranges": {
        "lengths": [300, 200], "queries": 20, "heads": 16, "kv_heads": 2, "many": 128, "sms": 30,
    },
    "one digit, rank 256": {"lengths": [200], "heads": 40, "rank": 256, "rope": 32, "mean": 1.0, "late": (0, 1, 2, 3)},
}  # fmt: skip


# What a launch writes for the next. Inputs are older: attention may read them before the launch ahead of it has ended.
WRITTEN = ("codes_ptr", "rope_ptr", "numbers_ptr", "parts_ptr", "lse_ptr", "more_ptr")


def filled(c: dict) -> dict:
    """A pool in which bytes that must not be read are NaN or -128, and the latents and keys that the rest stands for,
    `[tokens, rank]` and `[tokens, rope]` float64 of each KV head of each sequence."""
    rank, rope, heads, spec = c["rank"], c["rope"], c["kv_heads"], spec_of(c)
    counts = [max(-(-n // 128), 1) for n in c["lengths"]]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages).int()
    table = torch.full((len(counts), max(counts) + 1), int(order[-1]), dtype=torch.int32)
    pool = torch.full((num_pages, heads, spec.layout.nbytes), 0xFF, dtype=torch.uint8)
    mean, factor = (torch.randn(heads, rank), 0.5 + torch.rand(heads, rank // 128)) if c["static"] else (None, None)
    latents, keys, used = [], [], 0
    for seq, (n, count) in enumerate(zip(c["lengths"], counts, strict=True)):
        pages = order[used : used + count]
        table[seq, :count], used = pages, used + count
        latents.append([])
        keys.append([])
        for head in range(heads):
            x = rotate((torch.randn(n, rank) + c["mean"]) * (0.5 + torch.rand(n, 1)))
            x[slice(*c["zeros"])] = 0.0
            key = rotate(torch.randn(n, rope)) if c["in_codes"] else torch.randn(n, rope).half()
            scales = (torch.cat([x, key], 1) if c["in_codes"] else x).abs().amax(1) / 127
            if c["broken"] and seq == 1:
                scales[-1] = torch.nan
            decoded, codes = _rounded(x, scales)
            if c["in_codes"]:
                decoded_key, key = _rounded(key, scales)
            else:
                decoded_key = key.double()
            if mean is not None:
                decoded = mean[head].double() + factor[head].double().repeat_interleave(128) * decoded
            latents[-1].append(decoded)
            keys[-1].append(decoded_key)
            for i, page in enumerate(pages.tolist()):
                here = slice(128 * i, min(128 * i + 128, n))
                m = max(here.stop - here.start, 0)
                parts = pool[page, head].split([128 * rank, spec.layout.v_bytes, 512])
                if n:
                    parts[0].fill_(0x80)
                parts[0].view(torch.int8).view(128, rank)[:m] = codes[here]
                parts[1].view(key.dtype).view(128, rope)[:m] = key[here]
                parts[2].view(torch.float32)[:m] = scales[here]
    return {"pool": pool, "table": table, "mean": mean, "factor": factor, "latents": latents, "keys": keys}


def _rounded(x: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the codes of rotated channels stand for, and the codes."""
    codes = (x / scales[:, None]).round().nan_to_num().to(torch.int8)  # zeros of a scale that is zero or NaN
    return rotate_back(codes.double() * scales[:, None].double()), codes


def spec_of(c: dict) -> PageSpec:
    return PageSpec.latent(c["rank"], c["rope"], c["in_codes"])


def attend(c: dict) -> tuple[list[Launch], dict, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """The launches of a case, its pages, its queries, and the outputs that the launches write."""
    torch.manual_seed(0)
    pages = filled(c)
    seqs = len(c["lengths"])
    tokens = c["queries"] * seqs if c["bounds"] is None else c["bounds"][-1] + 2
    q = (torch.randn(tokens, c["heads"], c["rank"] + c["rope"]) * c["q"]).to(c["dtype"])
    if c["broken"]:
        q[0, 1, 5] = torch.nan
    with dry() as (launches, patch):
        patch.setattr(hopper.plan, "num_sms", lambda device: c["sms"])
        patch.setattr(hopper.plan, "MOST_TILES", c["most_tiles"])
        patch.setattr(hopper.plan, "MANY", c["many"])
        poison_empty(patch)
        hopper.plan.make_latent_plan.cache_clear()
        lengths = torch.tensor(c["lengths"], dtype=torch.int32)
        bounds = torch.tensor(c["bounds"], dtype=torch.int32) if c["bounds"] else None
        pads = None if c["pads"] is None else torch.tensor(c["pads"], dtype=torch.int32)
        params = AttentionParams(bounds, c["queries"], c["causal"], c["scale"], leftpad_k=pads)
        kv_format = KVFormat.of(spec_of(c), "int8", True, None, pages["mean"], pages["factor"])
        outputs = hopper.latent_decode(q, KVPages(pages["pool"], pages["table"], lengths, kv_format), params)
        hopper.plan.make_latent_plan.cache_clear()
    return launches, pages, q, outputs


def rounded_queries(c: dict, launch: Launch, tokens: int) -> torch.Tensor:
    """The queries that attention multiplies, `[T, heads, rank + rope]` float64, not rotated: decoded from what the
    first kernel has written."""
    named = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
    options = launch.constants["OPTIONS"]
    codes, rope, numbers = named["codes_ptr"], named["rope_ptr"], named["numbers_ptr"]
    tiles = named["row_tiles"]
    factor = numbers[2 * named["parts"] :][: len(codes) // 64 * options.rows].view(-1, options.rows)
    x, r = (y.view(len(codes) // 64, 64, y.shape[1]).double() for y in (codes, rope))
    if options.digits == 2:
        x, r = (y.unflatten(1, (4, 2, 8)) for y in (x, r))
        x, both = ((y[:, :, 0] * 128 + y[:, :, 1]).flatten(1, 2) for y in (x, r))
        r = both if c["in_codes"] else r[:, :, 0].flatten(1, 2)
    r = rotate_back(r) if c["in_codes"] else r
    x = torch.cat([rotate_back(x), r], -1) * factor.double()[..., None] / (c["scale"] * math.log2(math.e))
    bounds = c["bounds"] or [c["queries"] * i for i in range(len(c["lengths"]) + 1)]
    group = c["heads"] // c["kv_heads"]
    each = x.unflatten(0, (-1, c["kv_heads"], tiles)).flatten(2, 3)  # [seqs, kv_heads, rows, channels]
    rows = [each[i, :, : (b - a) * group].unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)
            for i, (a, b) in enumerate(pairwise(bounds))]  # fmt: skip
    x = torch.cat(rows)
    return torch.cat([x, x.new_zeros(tokens - len(x), *x.shape[1:])])


def reference(c: dict, pages: dict, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 on the pages' bytes."""
    bounds = c["bounds"] or [c["queries"] * i for i in range(len(c["lengths"]) + 1)]
    out = torch.zeros(len(q), c["heads"], c["rank"], dtype=torch.float64)
    lse = torch.full((len(q), c["heads"]), -torch.inf, dtype=torch.float64)
    for seq, (a, b) in enumerate(pairwise(bounds)):
        group = c["heads"] // c["kv_heads"]
        for head, (latents, keys) in enumerate(zip(pages["latents"][seq], pages["keys"][seq], strict=True)):
            rows = slice(head * group, head * group + group)
            for t in range(a, b):
                n = c["lengths"][seq] - (b - 1 - t if c["causal"] else 0)
                pad = c["pads"][seq] if c["pads"] else 0
                if n > pad:
                    scores = q[t, rows].double() @ torch.cat([latents[pad:n], keys[pad:n]], 1).T * c["scale"]
                    out[t, rows], lse[t, rows] = torch.softmax(scores, -1) @ latents[pad:n], scores.logsumexp(-1)
    return out, lse


def emulate_case(name: str, seed: int = 0) -> dict:
    c = PLAIN | EMULATED[name]
    launches, pages, q, (out, lse) = attend(c)
    before = (q, pages["pool"], pages["table"])
    for launch in launches:
        here = [x.x if isinstance(x, Tiles) else x for x in launch.args]
        late = [warp for warp in c["late"] if launch is launches[1]]  # other launches have fewer warps
        emulate(launch, tuple(late), tuple(x for x in before if any(x is y for y in here)), seed)
        before = [x for name, x in zip(launch.kernel.arg_names, launch.args, strict=False) if name in WRITTEN]
    ref, ref_lse = reference(c, pages, q)
    same_nan = torch.equal(out.isnan(), ref.isnan()) and torch.equal(lse.isnan(), ref_lse.isnan())
    rows = ~ref.isnan().any(-1)
    error = lambda a, b: float((a.double()[rows] - b[rows]).norm() / b[rows].norm())  # noqa: E731
    rounding = error(ref.to(out.dtype), ref)
    seen = ref_lse > -torch.inf
    row = {"case": name, "same_nan": same_nan, "same_inf": torch.equal(lse == -torch.inf, ref_lse == -torch.inf)}
    row["rel_err"] = max(error(out, ref) ** 2 - rounding**2, 0.0) ** 0.5
    if not c["static"] and not c["broken"]:
        exact, _ = reference(c, pages, rounded_queries(c, launches[0], len(q)))
        row["kernel_err"] = max(error(out, exact) ** 2 - rounding**2, 0.0) ** 0.5
    row["lse_err"] = float((lse - ref_lse)[seen].abs().max())
    # A constant in all rotated channels is in the first channel of each block.
    off = out.double()[rows] - ref[rows]
    row["first_channels"] = float(off[:, ::128].square().mean() / off.square().mean()) ** 0.5
    row["bits"] = int(out.view(torch.int16).long().sum()), float(lse[seen].double().sum())
    return row


def compile_case(name: str) -> dict:
    launches, *_ = attend(PLAIN | COMPILED[name])
    built = [build(launch) for launch in launches]
    sass = built[1].sass()
    accumulate, softmax_loop = sorted(products(sass), key=lambda loop: loop.get("MUFU", 0))
    return {
        "case": name, "registers": [x.registers for x in built], "spill_bytes": [x.spill_stores for x in built],
        "warnings": "".join(x.warnings for x in built), "shared_bytes": built[1].kernel.metadata.shared,
        "partitions": [int(x) for x in re.findall(r"setmaxnreg\S+ (\d+)", built[1].kernel.asm["ptx"])],
        "overwritten": sass.overwritten_operand(), "addressed": 16 * 32 * launches[1].constants["num_warps"],
        "end": built[1].kernel.metadata.shared - ring_barriers(built[1].kernel.asm["ptx"]),
        "accumulate": accumulate, "softmax": softmax_loop,
        "unsigned": built[1].kernel.asm["ptx"].count(".u8.u8"),
    }  # fmt: skip


def products(sass: Sass) -> list[dict]:
    """The innermost loops with products, in the order of the code: instructions, spills, barriers."""
    loops = [(a, b) for a, b in sass.loops() if any("GMMA" in x for x in sass.code[a:b])]
    loops = [(a, b) for a, b in loops if not any("USETMAXREG" in x or "EXIT" in x for x in sass.code[a:b])]
    loops = [x for x in loops if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    found = []
    for a, b in loops:
        names = Counter(re.sub(r"^@!?U?P\w+\s+", "", x).split()[0].split(".")[0] for x in sass.code[a : b + 1])
        found.append({"loop": b + 1 - a, "spills": sass.spills(a, b), "barriers": names["BAR"], **names})
    return found


def main() -> None:
    mode, *words = [a for a in sys.argv[1:] if not a.startswith("--")]
    function, cases = (compile_case, COMPILED) if mode == "compile" else (emulate_case, EMULATED)
    for name in cases:
        if not words or any(word in name for word in words):
            print(json.dumps(function(name)), flush=True)


if __name__ == "__main__":
    main()
