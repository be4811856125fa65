"""Says which Triton and ptxas compile the kernels for Hopper, and whether they are known to make slow or wrong ones."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

MEASURED: dict[tuple[int, ...], tuple[int, ...]] = {
    (3, 6): (12, 8),
    (3, 8): (12, 9),
    (3, 9): (13, 4),
}  # by Triton, the ptxas with which it was measured
COPIES = (3, 9)  # the first Triton whose copies of wgmma's operands cost time


def compiler() -> tuple[str, str]:
    """A status of `doctor.Check`, and what it says of the compiler. Triton must be installed."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas_version

    from fp8attn.kernels.common import RELEASE
    from fp8attn.kernels.operands import ptxas_release

    try:
        ptxas = ptxas_release(get_ptxas_version(90))
    except (OSError, RuntimeError) as problem:
        return (
            "no",
            f"Triton {triton.__version__} finds no ptxas, so kernels for NVIDIA GPUs cannot be compiled: {problem}",
        )
    return judge(RELEASE, ptxas, kept_copies())


def judge(release: tuple[int, ...], ptxas: tuple[int, ...], kept: dict[str, int]) -> tuple[str, str]:
    """What is known of a pair.

    Args:
        release, ptxas: the versions' first two numbers.
        kept: as `kept_copies` gives it.
    """
    from fp8attn.kernels.operands import SAFE_PTXAS

    name = f"Triton {dotted(release)}, ptxas {dotted(ptxas)}"
    said = []
    if ptxas < SAFE_PTXAS:
        said.append(
            f"ptxas before {dotted(SAFE_PTXAS)} can overwrite operands of running products (triton-lang/triton#9433)"
        )
        if MEASURED.get(release) == ptxas:
            said[-1] += "; fp8attn's kernels were searched for this, and have none"
    if release >= COPIES and ptxas < SAFE_PTXAS:
        said.append("prefill is slower with it: use the ptxas of Triton (unset TRITON_PTXAS_BLACKWELL_PATH)")
    for reason, count in kept.items():
        cost = ", and are slower, up to 45%" if release >= COPIES else ""
        said.append(f"{count} compiled prefill kernels have copies of their operands{cost}: {reason}")
    if release not in MEASURED:
        said.append(
            f"measured were {' and '.join(f'Triton {dotted(a)} with ptxas {dotted(b)}' for a, b in MEASURED.items())}"
        )
    known = MEASURED.get(release) == ptxas and not kept
    return "ok" if known else "warn", ": ".join([name, "; ".join(said)]) if said else name


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "of unknown version"


def kept_copies() -> dict[str, int]:
    """How many prefill kernels in Triton's cache on disk have copies of operands, by the reason
    (`kernels/operands.py`).
    """
    from triton import knobs

    from fp8attn.kernels.operands import DIRECT, NOTE

    found: Counter[str] = Counter()
    for path in Path(knobs.cache.dir).glob("*/prefill_kernel.json"):
        try:
            note = json.loads(path.read_text()).get(NOTE, DIRECT)
        except (OSError, ValueError):  # another process removes or writes it
            continue
        if note != DIRECT:
            found[note] += 1
    return dict(found)
