"""The tables and numbers of README.md and docs/ that come from results.

    python -m benchmarks.readme            # writes them anew
    python -m benchmarks.readme --check    # exits with 1 if a file is not up to date

What stands between `<!-- results: NAME -->` and `<!-- /results -->` is what `BLOCKS[NAME]` gives. A ratio is of rows that one command timed
together (`together`): there is no other way to write one here.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import cache

from .fingerprint import ROOT
from .problem import KEYS
from .results import RESULTS

FILES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"<!-- results: ([\w-]+) -->(\n?).*?<!-- /results -->", re.DOTALL)
Rows = dict[tuple[str, str], dict]


@cache
def rows(device: str, name: str) -> Rows:
    """The rows of a results file by case and implementation; none where there is no file."""
    path = RESULTS / device / f"{name}.json"
    return {(row["case"], row["impl"]): row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def devices(name: str) -> list[str]:
    """The GPUs that have a results file."""
    return [path.parent.name for path in sorted(RESULTS.glob(f"*/{name}.json")) if path.parent.name != "cpu"]


def together(a: dict, b: dict) -> bool:
    """Whether two rows were timed in turns."""
    return all(a.get(part) == b.get(part) for part in ("case", "provenance", "timed"))


def ratio(ours: dict | None, theirs: dict | None) -> float | None:
    """How many times as fast one row is as another; None unless they were timed together."""
    return theirs["ms"] / ours["ms"] if ours and theirs and together(ours, theirs) else None


def fastest(found: Rows, case: str, impls: Iterable[str]) -> dict | None:
    return min((found[case, impl] for impl in impls if (case, impl) in found), key=lambda row: row["ms"], default=None)


def over_bf16(found: Rows, case: str, impl: str) -> float | None:
    """A row of `sdpa` over the best BF16 kernel that it was timed with; `fp8attn` is the graph where there is one."""
    bf16 = fastest(found, case, ("fa3-bf16", "cudnn-bf16"))
    return ratio(found.get((case, f"{impl}-graph"), found.get((case, impl))), bf16)


# How things are written


def latest(name: str) -> tuple[str, Rows]:
    """The title of one device, and its rows: of several, the last by name."""
    device = devices(name)[-1]
    return title(device), rows(device, name)


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """A table, without columns that hold nothing."""
    lines = [list(head), *map(list, body)]
    filled = [any(line[column] for line in lines[1:]) for column in range(len(lines[0]))]
    lines = [[cell for cell, there in zip(line, filled, strict=True) if there] for line in lines]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |").replace("|  |", "| |")


def number(x: float | None, form: str = ".2f") -> str:
    return "" if x is None else format(x, form)


def span(xs: Iterable[float | None], form: str = ".2f") -> str:
    """The least and the largest."""
    found = [x for x in xs if x is not None]
    low, high = format(min(found), form), format(max(found), form)
    return low if low == high else f"{low} to {high}"


def tokens(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else f"{n:,}"


def title(device: str) -> str:
    return device.upper()


def lengths(found: Rows, pattern: str) -> dict[int, str]:
    """Cases by the number that a pattern captures, in its order."""
    return dict(sorted({int(match[1]): case for case, _ in found if (match := re.fullmatch(pattern, case))}.items()))


# Kernels

PREFILL = {
    "D128-full-S16384": "16k full", "D128-causal-S16384": "16k causal", "D128-causal-S1024": "16 x 1k causal",
    "D128-causal-S4096": "4 x 4k causal", "D128-causal-S8192": "2 x 8k causal", "D128-causal-S65536": "64k causal",
    "gqa-causal-S16384": "16k causal, 32/8 heads", "gqa-causal-S131072": "128k causal, 32/8 heads",
    "chunked-2k-on-128k": "2k on 128k, 32/8 heads", "varlen-mix": "ragged, 32/8 heads", "D64-full-S16384": "16k full, head_dim 64",
    "D64-causal-S16384": "16k causal, head_dim 64", "D256-full-S16384": "16k full, head_dim 256",
    "D256-causal-S16384": "16k causal, head_dim 256",
}  # fmt: skip
SINGLE_LEVEL = ("fa3-fp8", "cudnn-fp8")
PREFILL_IMPLS = (*KEYS, "fp8attn-q8")  # queries in 16 bits, and in FP8
OTHER = {key: f"{name.upper()} keys" for key, name in KEYS.items() if key != "fp8attn"}  # not the default's


def decode() -> str:
    head, found = ["batch x context"], [rows(device, "decode") for device in devices("decode")]
    for device in devices("decode"):
        head += [f"{title(device)}: GB/s", "over vLLM FP8, paged", "of the ceiling"]
    body = []
    for case in dict.fromkeys(case for here in found for case, _ in here):
        line = [case.replace("-", ", ")]
        for here in found:
            ours = here.get((case, "fp8attn"))
            of_ceiling = ratio(ours, here.get((case, "stream-ceiling")))
            line += [
                number(ours and ours["gbps"], ".0f"), number(ratio(ours, here.get((case, "vllm-fa3-fp8-paged")))), number(of_ceiling, ".0%")
            ]  # fmt: skip
        body.append(line)
    return table(head, body)


def decode_error() -> str:
    found = [row for device in devices("decode") for row in rows(device, "decode").values()]
    ours = max(row["rel_err"] for row in found if row["impl"] in KEYS)
    theirs = [row["rel_err"] for row in found if row["impl"].startswith("vllm-fa3-fp8")]
    return f"at most {ours:.1e} off; vLLM's FP8, which rounds Q and the weights, {span(theirs, '.1e')}"


def prefill() -> str:
    head = ["tokens"]
    for device in devices("prefill"):
        head += [
            f"{title(device)}: TFLOPS",
            "over the best single-level FP8",
            "over vLLM FP8",
            "16-bit queries",
            *(f"16-bit queries, {keys}" for keys in OTHER.values()),
        ]
    body = []
    for case, what in PREFILL.items():
        line = [what]
        for device in devices("prefill"):
            here = rows(device, "prefill")
            ours = here.get((case, "fp8attn-q8"))
            line += [
                number(ours and ours["tflops"], ".0f"), number(ratio(ours, fastest(here, case, SINGLE_LEVEL))),
                number(ratio(ours, here.get((case, "vllm-fa3-fp8")))),
                *(number(here.get((case, impl), {}).get("tflops"), ".0f") for impl in KEYS),
            ]  # fmt: skip
        body.append(line)
    return table(head, body)


def sdpa() -> str:
    """One table for all devices: kinds of calls by lengths."""
    kinds = {"full": "full", "causal": "causal", "gqa-full": "full, 8 KV heads", "gqa-causal": "causal, 8 KV heads"}
    body, at = [], sorted({n for device in devices("sdpa") for n in lengths(rows(device, "sdpa"), r"(?:gqa-)?(?:full|causal)-S(\d+)")})
    for device in devices("sdpa"):
        for kind, what in kinds.items():
            body.append([f"{title(device)}, {what}", *(number(over_bf16(rows(device, "sdpa"), f"{kind}-S{n}", "fp8attn")) for n in at)])
    return table(["over BF16, tokens", *map(tokens, at)], body)


def append() -> str:
    cases = dict.fromkeys(case for device in devices("append") for case, _ in rows(device, "append"))
    what = {"step": "a decode step's append", "prompt": "a prompt's append", "quantize": "`quantize`"}
    head = [""]
    for device in devices("append"):
        head += [f"{title(device)}: us", "GB/s", "of the ceiling"]
    body = []
    for case in cases:
        for impl in (*KEYS, *(f"{impl}-rope" for impl in KEYS)):
            if not any((case, impl) in rows(device, "append") for device in devices("append")):
                continue
            words = next(text for word, text in what.items() if word in case)
            options = impl.replace("fp8attn", "").replace("-e4m3-keys", "-E4M3 keys").split("-")[1:]
            details = [part for part in case.split("-") if part not in what] + options
            line = [f"{words}: {', '.join(details)}"]
            for device in devices("append"):
                here = rows(device, "append")
                ours = here.get((case, impl))
                line += [
                    number(ours and ours["ms"] * 1e3, ".1f"), number(ours.get("gbps") if ours else None, ".0f"),
                    number(ratio(ours, here.get((case, "ceiling"))), ".0%"),
                ]  # fmt: skip
            body.append(line)
    return table(head, body)


def portable() -> str:
    found = [row for device in devices("slice") for row in rows(device, "slice").values() if row["impl"] == "fp8attn-triton"]
    gbps, tflops = ([row[unit] for row in found if unit in row] for unit in ("gbps", "tflops"))
    return f"Decode {span(gbps, '.0f')} GB/s, prefill {span(tflops, '.0f')} TFLOPS"


def prefill_256() -> str:
    made = [
        f"{number(ratio(here.get((case, 'fp8attn-q8')), here.get((case, 'fa3-fp8'))))} ({mask}, {title(device)})"
        for device in devices("prefill") for here in [rows(device, "prefill")]
        for mask in ("full", "causal") for case in [f"D256-{mask}-S16384"] if (case, "fp8attn-q8") in here
    ]  # fmt: skip
    return ", ".join(made)


# Accuracy


def prefill_rounding() -> str:
    """128 queries of 4,096 keys and more, by V's mean and implementation."""
    errors: dict[tuple[str, str], list[float]] = {}
    for device in devices("accuracy"):
        for (case, impl), row in rows(device, "accuracy").items():
            if (match := re.fullmatch(r"full-(mean\d)-D128-S(\d+)", case)) and int(match[2]) >= 4096:
                errors.setdefault((match[1], impl), []).append(row["rel_err"])
    q8, plain = (span((100 * error for error in errors["mean0", impl]), ".1f") for impl in ("fp8attn-q8", "fp8attn"))
    most = max(error for (data, impl), found in errors.items() for error in found if data == "mean1" and impl in PREFILL_IMPLS)
    return f"normal V without a mean is {q8}% off ({plain}% with Q in 16 bits, whose rounding then counts), V of mean 1 at most {most:.2%}"


def prefill_error() -> str:
    """On V of mean 1, by both benchmarks that measure it."""
    found = [(row["case"], row["impl"], row["rel_err_mean1"]) for device in devices("prefill") for row in rows(device, "prefill").values()]
    for device in devices("accuracy"):
        found += [
            (case, impl, row["rel_err"]) for (case, impl), row in rows(device, "accuracy").items() if re.match("(causal|full)-mean1", case)
        ]
    ours = max(error for _, impl, error in found if impl in PREFILL_IMPLS)
    level = [span((e for case, impl, e in found if impl in SINGLE_LEVEL and case.endswith(f"S{n}")), ".0%") for n in (16384, 131072)]
    return f"single-level kernels are {level[0]} off at 16k tokens and {level[1]} at 128k, ours at most {ours:.2%} at any length"


def accumulation() -> str:
    device, here = latest("accumulation")
    cases = lengths(here, r"S(\d+)")
    body = [[impl, *(f"{here[case, impl]['rel_err']:.1%}" for case in cases.values())] for impl in dict.fromkeys(impl for _, impl in here)]
    return table([f"{device}; keys", *(f"{n:,}" for n in cases)], body)


def doctor() -> str:
    from fp8attn.accumulation import Accumulation

    _, here = latest("accumulation")
    found = {
        impl: Accumulation({n: here[case, impl]["rel_err"] for n, case in lengths(here, r"S(\d+)").items()})
        for impl in dict.fromkeys(impl for _, impl in here)
    }
    wide = max(map(len, found)) + len("accumulation of ")
    lines = [f"{'ok ' if x.levels == 2 else '!  '} {f'accumulation of {impl}':{wide}s}  {x}" for impl, x in found.items()]
    return "```\n" + "\n".join(lines) + "\n```"


STORED = {  # of `real_model`
    "fp8attn-int8-keys": "INT8 keys, rotated", "fp8attn-e4m3-keys": "E4M3 keys, rotated", "fp8attn-e4m3-plain": "E4M3 keys, not rotated",
    "scale-1": "a plain cast to E4M3", "transformers-fp8": "transformers' FP8 cache",
}  # fmt: skip
TEXTS = {
    "smollm2-S2048": "code, 2k", "smollm2-S8192": "code, 8k", "smollm2-prose-S8192": "English prose, 8k", "stdlib-S4096": "our model, 4k",
    "stdlib-S131072": "our model, 128k",
}  # fmt: skip


def real_model() -> str:
    """Perplexity beside BF16 and divergence beyond BF16's own, by what is stored and how it is read."""
    device, found = latest("real_model")
    cases = [case for case in TEXTS if (case, "bf16") in found]

    def cell(case: str, impl: str) -> str:
        row = found.get((case, impl))
        if row is None or row["d_ppl_pct"] is None:
            return ""
        return f"{row['d_ppl_pct']:+.2f} ± {row['d_ppl_se']:.2f}%, {1e3 * row['kl_excess']:.1f}"

    body = [
        [stored, how, *(cell(case, f"{name}-{how}") for case in cases)] for name, stored in STORED.items() for how in ("prefill", "decode")
    ]
    return table(["stored", f"read ({device})", *(TEXTS[case] for case in cases)], body)


def perplexity(impls: Iterable[str] = ("fp8attn",)) -> str:
    body = []
    for device in devices("perplexity"):
        for (_, impl), row in rows(device, "perplexity").items():
            if impl in impls:
                how = "prefilled" if row["mode"] == "chunks" else "decoded"
                change, deviation = 100 * row["change"], 100 * row["standard_error"]
                of = f"{row['context']:,}, {how}, {title(device)}"
                body.append([of, impl, f"{change:+.2f} ± {deviation:.2f}%", f"{row['kl']:.4f}", f"{row['top1_agreement']:.1%}"])
    for device in devices("drift"):
        found = list(rows(device, "drift").values())
        changes = [100 * math.expm1(row["nll"] - row["baseline_nll"]) for row in found]
        deviation = statistics.stdev(changes) / len(changes) ** 0.5
        total = found[-1]["stop"] - found[0]["start"]
        body.append([
            f"{total:,} decoded behind {found[0]['start']:,}, pages copied, reordered, truncated, {title(device)}", found[0]["impl"],
            f"{statistics.fmean(changes):+.2f} ± {deviation:.2f}%", f"{statistics.fmean(row['kl'] for row in found):.4f}",
            f"{statistics.fmean(row['top1_agreement'] for row in found):.1%}",
        ])  # fmt: skip
    return table(["tokens of held-out code", "cache", "perplexity over BF16's", "KL, nats", "same likeliest token"], body)


def perplexity_all() -> str:
    return perplexity((*KEYS, "fp8attn-static"))


def drift_operations() -> str:
    """Mean KL divergence of the segments after each kind of operation."""
    by: dict[str, list[float]] = {}
    for row in latest("drift")[1].values():
        by.setdefault(row["operation"] or "none", []).append(row["kl"])
    return ", ".join(f"{statistics.fmean(kls):.4f} after {what}" for what, kls in by.items())


def demo() -> dict[str, dict[str, float]]:
    """By device; the keys are `case/impl`."""
    folders = [path.parent.name for path in sorted(RESULTS.glob("*/demo.json"))]
    return {folder: {f"{case}/{impl}": row["value"] for (case, impl), row in rows(folder, "demo").items()} for folder in folders}


def memory() -> str:
    (fp8, bf16), *_ = {(here["demo-bytes_per_token/fp8"], here["demo-bytes_per_token/bf16"]) for here in demo().values()}
    return f"{fp8:,.0f} bytes a token beside {bf16:,.0f} in BF16, **{fp8 / bf16:.1%}**"


def demo_equal() -> str:
    found = demo().values()
    cells, matched, count = (
        min(here[f"demo-{name}/fp8"] for here in found) for name in ("needle_cells_equal", "greedy_tokens_matched", "greedy_tokens")
    )
    return f"{'the same' if cells else 'not the same'} needles and {matched} of {count} greedy tokens alike"


def bits() -> str:
    row = latest("model")[1]["bits_per_byte-all", "stdlib-llama"]
    return f"{row['model']:.2f} bits per byte (xz -9e {row['xz_9e']:.2f})"


# Retrieval

SYSTEMS = {
    "bf16": "bf16", "fp8attn": "fp8attn", "fp8attn-static": "fp8attn-static", "fp8attn-int8-keys": "fp8attn, INT8 keys",
    "fp8attn-e4m3-keys": "fp8attn, E4M3 keys",
    "fa3-fp8": "FA3 FP8, scales of one", "fa3-fp8:calibrated": "FA3 FP8, calibrated", "fa3-fp8:means": "FA3 FP8, scales of one, means off",
    "fa3-fp8:calibrated+means": "FA3 FP8, calibrated, means off", "vllm-fa3-fp8": "vLLM's FA3, scales of one",
    "vllm-fa3-fp8:calibrated": "vLLM's FA3, calibrated",
}  # fmt: skip


def needle() -> Rows:
    return latest("needle")[1]


def right(row: dict | None) -> str:
    return "" if row is None else f"{100 * row['accuracy']:.4g} ({row['samples']})"


def retrieval_lengths() -> str:
    at = lengths(needle(), r"niah_multikey_2-S(\d+)")
    body = [[impl, *(right(needle().get((case, impl))) for case in at.values())] for impl in ("bf16", "fp8attn")]
    body.append(lost_and_won(at.values()))
    return table(["`niah_multikey_2`, % right (samples)", *(f"{n:,}" for n in at)], body)


def lost_and_won(cases: Iterable[str]) -> list[str]:
    """Of the samples that both were asked, how many one alone had right, and McNemar's p."""
    ours = [needle()[case, "fp8attn"] for case in cases]
    return ["lost, won (p)", *(f"{row['lost']}, {row['won']} ({row['p']:.2g})" for row in ours)]


def retrieval() -> str:
    cases = {"as trained": "niah_multikey_2-S131072"} | {f"stress {n}": f"niah_multikey_2-stress{n}-S131072" for n in (1, 2, 3)}
    body = [[what, *(right(needle().get((case, impl))) for case in cases.values())] for impl, what in SYSTEMS.items()]
    return table(["131,072 tokens, % right (samples)", *cases], body)


def chains() -> str:
    at = lengths(needle(), r"ruler_vt-S(\d+)")
    body = [[impl, *(right(needle()[case, impl]) for case in at.values())] for impl in ("bf16", "fp8attn")]
    body.append(lost_and_won(at.values()))
    return table(["`ruler_vt`, whole chains, % right (samples)", *(f"{n:,}" for n in at)], body)


def other_tasks() -> str:
    tasks = {"niah_single_1": r"niah_single_1-S(\d+)", "niah_multikey_3": r"niah_multikey_3-S(\d+)"}
    body = []
    for task, pattern in tasks.items():
        for n, case in lengths(needle(), pattern).items():
            body.append([f"`{task}`, {n:,}", *(right(needle().get((case, impl))) for impl in ("bf16", "fp8attn"))])
    return table(["% right (samples)", "bf16", "fp8attn"], body)


# Models and the host


def llama_decode() -> str:
    body = []
    for device in devices("llama_decode"):
        here = rows(device, "llama_decode")
        for batch, length in ((1, 2048), (1, 131072), (8, 8192), (32, 2048)):
            case = f"step-B{batch}-S{length}"
            line = here[f"line-B{batch}", "fp8attn"]
            times = [here.get((case, impl), {}).get("ms") for impl in (line["beside"], "vllm-fp8", "fp8attn")]
            body.append(
                [title(device), str(batch), f"{length:,}", *(number(ms, ".1f") for ms in times), number(line["slope_ratio"], ".0%")]
            )
    head = ["", "batch", "context", "BF16, ms", "vLLM FP8, ms", "fp8attn, ms", "growth with the context, of BF16's"]
    return table(head, body)


def fits() -> str:
    made = []
    for device in devices("llama_decode"):
        here = rows(device, "llama_decode")
        begin = max(row["break_even"] for row in here.values() if row.get("break_even"))
        made.append(
            f"from {begin:,} tokens on, and {here['fits-S8192', 'fp8attn']['over_bf16']:.2f} times the tokens fit ({title(device)})"
        )
    return ", ".join(made)


def llama_prefill() -> str:
    body, at = [], lengths({k: v for device in devices("llama_prefill") for k, v in rows(device, "llama_prefill").items()}, r"S(\d+)")
    for device in devices("llama_prefill"):
        here = rows(device, "llama_prefill")
        body.append([title(device), *(number(here.get((case, "fp8attn"), {}).get("speedup")) for case in at.values())])
    return table(["over BF16, tokens", *map(tokens, at)], body)


def wan() -> str:
    body = []
    for device in devices("wan"):
        for size in ("720p", "1080p"):
            row = rows(device, "wan")[f"stack-{size}", "fp8attn"]
            blocks = f"{size}, {row['layers']} blocks, {row['bf16_layers']} of them in BF16"
            body.append([title(device), blocks, f"{row['tokens']:,}", number(row["speedup"])])
    return table(["", "Wan2.1-14B-shaped blocks, 81 frames", "tokens", "over BF16"], body)


def overhead() -> str:
    found = {device: rows(device, "overhead") for device in devices("overhead")}
    body = []
    for key in dict.fromkeys(key for here in found.values() for key in here):
        times = [here[key]["us"] if key in here else None for here in found.values()]
        body.append([*key, *("" if us is None else f"{us:.1f} us" if us < 1000 else f"{us / 1000:.1f} ms" for us in times)])
    return table(["call", "by", *map(title, found)], body)


def sanitizer() -> str:
    body, (device, here) = [], latest("sanitize")
    for (case, impl), row in here.items():
        found = str(row.get("errors", "")) + (f" ({row['dispatch']} in Triton's dispatch)" if row.get("dispatch") else "")
        body.append([*case.split("-", 1), "" if impl == "fp8attn" else impl, "yes" if row["finished"] else "no", found])
    return table([f"tool ({device})", "kernel", "", "finished", "errors"], body)


BLOCKS: dict[str, Callable[[], str]] = {
    made.__name__.replace("_", "-"): made
    for made in (
        accumulation, append, bits, chains, decode, decode_error, demo_equal, doctor, drift_operations, fits,
        llama_decode, llama_prefill, memory, other_tasks, overhead, perplexity, perplexity_all, portable, prefill, prefill_256,
        prefill_error, prefill_rounding, real_model, retrieval, retrieval_lengths, sanitizer, sdpa, wan,
    )
}  # fmt: skip


def filled(text: str) -> str:
    """A file's text with what belongs between its markers. Markers on lines of their own hold lines."""

    def fill(match: re.Match) -> str:
        made, line = BLOCKS[match[1]](), match[2]
        gap = "\n" if line and made.startswith("|") else ""  # Markdown's tables begin and end with an empty line
        return f"<!-- results: {match[1]} -->{line}{gap}{made}{gap}{line}<!-- /results -->"

    return BLOCK.sub(fill, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    old = [path for path in FILES if filled(path.read_text()) != path.read_text()]
    for path in old:
        if args.check:
            print(f"{path.relative_to(ROOT)} is not what results say: run python -m benchmarks.readme")
        else:
            path.write_text(filled(path.read_text()))
    sys.exit(bool(old) and args.check)


if __name__ == "__main__":
    main()
