"""The host's time."""

from __future__ import annotations

from ..rows import latest
from .writing import block, table


@block("overhead")
def overhead() -> str:
    title, found = latest("overhead")
    cell = lambda us: f"{us:.1f} us" if us < 1000 else f"{us / 1000:.1f} ms"  # noqa: E731
    return table(
        ["call", "by", title],
        [[case.rpartition(": ")[2], impl, cell(row["us"])] for (case, impl), row in found.items()],
    )


@block("first_token")
def first_token() -> str:
    """Seconds until the first and the second token, and of a warm-up, from an empty cache of Triton."""
    title, found = latest("first_token")
    body = []
    for (case, impl), row in found.items():
        if case == "warmup":
            body.append(["`warmup` of Llama-3.1-8B's shape", f"{row['seconds']:.1f}", "", ""])
        elif case == "llama":
            again = ", a second process" if impl.endswith("again") else ""
            what = f"Llama-3.1-8B's shape, a prompt of 8,192 tokens{again}"
            kernels = f"{row['compiled']} compiled, {row['loaded']} from disk"
            body.append([what, f"{row['first_token_s']:.1f}", f"{row['second_token_s']:.1f}", kernels])
    return table([title, "s to the first token", "to the second", "kernels"], body)
