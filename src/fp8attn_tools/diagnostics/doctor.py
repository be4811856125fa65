"""Reports what this machine can run, why it cannot run the rest, and whether a model's K and V are hard to store in 8
bits.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import fp8attn
from fp8attn.backends import DENSE_BACKENDS, fa3, unsupported_reason
from fp8attn.backends.hopper import MOST_CHANNELS
from fp8attn.extras import hint
from fp8attn.formats.spec import HEAD_DIMS
from fp8attn.scales import ranges

from . import accumulation, compiler

PACKAGES = {  # by name, what needs it
    "triton": "the GPU kernels",
    "transformers": f"models ({hint('hf')})",
    "safetensors": "saved scales",
    "diffusers": f"image and video models ({hint('diffusers')})",
    "matplotlib": f"plots ({hint('plot')})",
}


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis.

    Attributes:
        status: `"ok"`, `"warn"` (it works, with a limit that the detail explains), `"no"` (it cannot be used here) or
            `"info"`.
        detail: a version, or a reason and what to do about it.
    """

    name: str
    status: str
    detail: str


def diagnose(measure: bool = True) -> list[Check]:
    """Check versions and devices, whether each backend runs on each device, and how exactly the FP8 kernels sum.

    Args:
        measure: run the installed FP8 kernels, FlashAttention-3's builds among them, on the first Hopper GPU
            (`accumulation`). This takes milliseconds, plus the time to compile and load. Nothing else starts a kernel.
    """
    versions = {"fp8attn": fp8attn.__version__, "python": platform.python_version(), "torch": torch.__version__}
    checks = [Check(name, "info", version) for name, version in versions.items()]
    for package, use in PACKAGES.items():
        try:
            checks.append(Check(package, "ok", importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            checks.append(Check(package, "no", f"not installed; needed for {use}"))
    if torch.version.hip is None and importlib.util.find_spec("triton"):
        status, detail = compiler.compiler()
        if not torch.cuda.is_available():  # nothing is compiled here, so only the versions matter
            status, detail = "info", detail.partition(": ")[0]
        checks.append(Check("compiler of Hopper's kernels", status, detail))
    checks.append(Check("cpu", "info", f"{platform.machine()}, {torch.get_num_threads()} threads of {os.cpu_count()}"))
    devices = _gpus(checks)
    for device in [*devices, "cpu"]:
        for backend in DENSE_BACKENDS:
            reason = unsupported_reason(backend, device)
            runs = f"runs {fa3.default().name}" if backend == "fa3" and not reason else "runs"  # which build
            if backend == "hopper":
                runs += f" a head_dim of up to {MOST_CHANNELS}; {HEAD_DIMS[-1]} runs on triton"
            checks.append(Check(f"backend {backend} on {device}", "no" if reason else "ok", reason or runs))
    hopper = next((device for device in devices if unsupported_reason("hopper", device) is None), None)
    if measure and hopper is not None:
        for name, attend in accumulation.kernels(device=hopper).items():
            result = accumulation.measure(attend, hopper)
            checks.append(Check(f"accumulation of {name}", "ok" if result.levels == 2 else "warn", str(result)))
    return checks


def served(config: Any) -> Check:
    """Whether `FP8Cache` can serve a transformers model with this config, or why not."""
    from fp8attn.integrations.transformers.config import decoder_config, unsupported_reason

    name = f"model {config.name_or_path or decoder_config(config).model_type}"
    reason = unsupported_reason(config)
    return Check(name, "no" if reason else "ok", reason or "FP8Cache can serve it")


def latents(config: Any) -> list[Check]:
    """What `FP8Cache` does with latents, by the config of a transformers model that it can serve; empty if the model
    caches K and V. Weights need not be read: latents have no biases.
    """
    from fp8attn.integrations.transformers.config import decoder_config, layers_of

    pages = {index: layer.pages for index, layer in enumerate(layers_of(config)) if layer.rank is not None}
    if not pages:
        return []
    spec = next(iter(pages.values()))
    rank, rope = spec.widths
    checks = [
        Check(
            "latents",
            "ok",
            f"layers {ranges(pages)}: {rank} channels in INT8 and {rope} of a key with RoPE in FP16, "
            f"{spec.layout.token_bytes:,} bytes a token and layer for {2 * (rank + rope):,} in 16 bits",
        )
    ]
    quantization = getattr(decoder_config(config), "quantization_config", None)
    if quantization is not None:
        checks.append(
            Check(
                "kv_b_proj",
                "warn",
                "the model is quantized. fp8attn reads the weight of kv_b_proj, and where this is quantized, too, all "
                "latents are expanded in every step, which is slow. Dequantize the model, or leave kv_b_proj out of "
                "the quantization",
            )
        )
    return checks


def examine(model: Any) -> list[Check]:
    """Check what the biases of a transformers model do to its K and V in 8 bits.

    Names the layers that `FP8Cache` gives static means, the layers whose K has an offset that no constant removes, and
    those of them that lose accuracy with INT8 keys.
    """
    from fp8attn.integrations.transformers.biases import layer_biases

    biases = layer_biases(model)
    checks = [
        Check(f"static means of {which.upper()}", "ok", f"layers {ranges(layers)}: from the model's biases")
        for which in "kv"
        if (layers := [index for index, layer in biases.items() if getattr(layer, f"{which}_mean") is not None])
    ]
    if unread := [index for index, layer in biases.items() if layer.unread]:
        detail = (
            f"layers {ranges(unread)}: cannot be read from the weights, so these layers get no static means; fp8attn "
            f"calibrate finds them"
        )
        checks.append(Check("biases of K and V", "warn", detail))
    checks += offset_checks({index: layer.k_offset for index, layer in biases.items() if layer.stands_out})
    if steps := {index: layer.k_step for index, layer in biases.items() if layer.loses}:
        worst = max(steps, key=lambda layer: steps[layer])
        detail = (
            f"layers {ranges(steps)}: the offset makes the step of INT8 keys up to {steps[worst]:.0f} times as large "
            f"(layer {worst}). FP8Cache keeps them in 16 bits, as skip_layers={sorted(steps)} does, unless skip_layers "
            f"says otherwise; vLLM and SGLang cannot"
        )
        checks.append(Check("steps of INT8 keys", "warn", detail))
    if not checks:
        checks.append(Check("biases of K and V", "ok", "none is several deviations: no static means"))
    return checks


def offset_checks(offsets: Mapping[int, float]) -> list[Check]:
    """A warning about layers whose K has an offset that no static mean removes.

    Args:
        offsets: by layer, the size of the offset in deviations.
    """
    if not offsets:
        return []
    worst = max(offsets, key=lambda layer: offsets[layer])
    detail = (
        f"layers {ranges(offsets)}: RoPE rotates an offset of up to {offsets[worst]:.0f} deviations (layer {worst}), "
        f"so no static mean removes it. INT8 keys lose least. fp8attn sensitivity measures what a layer loses; "
        f"skip_layers keeps it in 16 bits"
    )
    return [Check("offsets of K", "warn", detail)]


def _gpus(checks: list[Check]) -> list[str]:
    devices = []
    for device_type, module in (("cuda", torch.cuda), ("xpu", torch.xpu)):
        if not module.is_available():
            continue
        for index in range(module.device_count()):
            name, memory = module.get_device_name(index), module.get_device_properties(index).total_memory
            detail = f"{name}, {memory / 2**30:.0f} GiB"
            if device_type == "cuda" and torch.version.hip is None:
                capability = torch.cuda.get_device_capability(index)
                detail += f", capability {capability[0]}.{capability[1]}: {_fp8_support(capability)}"
            checks.append(Check(f"{device_type}:{index}", "ok", detail))
            devices.append(f"{device_type}:{index}")
    if not devices:
        checks.append(
            Check("gpu", "no", "this PyTorch can use none: the reference backend runs everything on the CPU, slowly")
        )
    return devices


def _fp8_support(capability: tuple[int, int]) -> str:
    """How a CUDA compute capability (major, minor) supports FP8."""
    if capability >= (9, 0):
        return "FP8 tensor cores"
    if capability == (8, 9):
        return "FP8 conversion in hardware"
    return "no FP8 hardware: FP8 storage, converted in software, 16-bit arithmetic"
