"""Whole models, the host's time, and the sanitizer's findings."""

from __future__ import annotations

from ..lines import batches, line
from ..rows import devices, latest, lengths, measured
from .writing import block, number, table, tokens, value


@block
def llama_decode() -> str:
    body = []
    for title, here in devices("llama_decode").items():
        for batch, length in ((1, 2048), (1, 131072), (8, 8192), (32, 2048)):
            ours = line(here, batch)
            times = [value(here, f"step-B{batch}-S{length}", impl, "ms", ".1f") for impl in (ours.beside, "vllm-fp8", "fp8attn")]
            body.append([title, str(batch), f"{length:,}", *times, number(ours.slope_ratio, ".0%")])
    head = ["", "batch", "context", "BF16, ms", "vLLM FP8, ms", "fp8attn, ms", "growth with the context, of BF16's"]
    return table(head, body)


@block
def fits() -> str:
    made = []
    for title, here in devices("llama_decode").items():
        lines = [line(here, batch) for batch in batches(here)]
        begin = max(ours.break_even for ours in lines if ours and ours.break_even)
        made.append(f"from {begin:,.0f} tokens on, and {value(here, 'fits-S8192', 'fp8attn', 'over_bf16')} times the tokens fit ({title})")
    return ", ".join(made)


@block
def llama_prefill() -> str:
    at = lengths([key for here in devices("llama_prefill").values() for key in here], r"S(\d+)")
    body = [[title, *(value(here, case, "fp8attn", "speedup") for case in at.values())] for title, here in devices("llama_prefill").items()]
    return table(["over BF16, tokens", *map(tokens, at)], body)


@block
def wan() -> str:
    body = []
    for title, here in devices("wan").items():
        for size in ("720p", "1080p"):
            row = here[f"stack-{size}", "fp8attn"]
            blocks = f"{size}, {row['layers']} blocks, {row['bf16_layers']} of them in BF16"
            body.append([title, blocks, f"{row['tokens']:,}", number(row["speedup"])])
    return table(["", "Wan2.1-14B-shaped blocks, 81 frames", "tokens", "over BF16"], body)


@block
def overhead() -> str:
    def cell(us: float | None) -> str:
        return "" if us is None else f"{us:.1f} us" if us < 1000 else f"{us / 1000:.1f} ms"

    found = devices("overhead")
    keys = dict.fromkeys(key for here in found.values() for key in here)
    return table(["call", "by", *found], [[*key, *(cell(here.get(key, {}).get("us")) for here in found.values())] for key in keys])


@block
def sanitizer() -> str:
    body, (title, here) = [], latest("sanitize")
    for (case, impl), row in here.items():
        found = str(row.get("errors", "")) + (f" ({row['dispatch']} in Triton's dispatch)" if row.get("dispatch") else "")
        body.append([*case.split("-", 1), "" if impl == "fp8attn" else impl, "yes" if row["finished"] else "no", found])
    return table([f"tool ({title})", "kernel", "", "finished", "errors"], body)


@block
def sanitizer_measured() -> str:
    return measured("sanitize")
