"""A model with planted offsets and outliers (`benchmarks.stress`), saved as a checkpoint that vLLM loads, and
calibrated for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.stress import STRENGTHS, Strength, plant
from fp8attn_tools import calibrate
from fp8attn_tools.checkpoints import export
from fp8attn_tools.evaluation import models


def save_planted(model: Any, tokenizer: Any, folder: Path, strength: Strength) -> None:
    """Save a Llama in BF16 with planted offsets; vLLM wants a bias in each projection of attention, or in none."""
    plant(model, strength)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear = getattr(layer.self_attn, name)
            if linear.bias is None:
                linear.bias = torch.nn.Parameter(torch.zeros(linear.out_features), requires_grad=False)
    model.config.attention_bias = True
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare(
    folder: str | Path, source: str | None = None, number: int = 3, strategy: Any = "tensor"
) -> dict[str, Path]:
    """Write the planted checkpoint, and what calibration makes of it. It runs on the CPU.

    Args:
        folder: of all that is written.
        source: a model as `models.load` takes it.
        number: of `STRENGTHS`.
        strategy: of `export`.
    Returns:
        `model`, the planted checkpoint; `folded` and `covered`, its exports with V's mean moved into biases and with a
        scale that covers it; `means`, a file of calibrated means for fp8attn in vLLM.
    """
    model, tokenizer = models.load(source, device="cpu")
    tokens = models.tokenize(tokenizer, models.read_text(None, source or models.default_model()))
    folder = Path(folder)
    made = {"model": folder / "model", "means": folder / "means.safetensors"}
    save_planted(model, tokenizer, made["model"], STRENGTHS[number])
    model, _ = models.load(made["model"], device="cpu")
    text = models.windows(tokens, 1024, 4, from_end=True).split(1)
    calibrate(model, text).save(made["means"])
    scales = calibrate(model, text, key_dtype="e4m3", rotate_keys=False)
    for name, fold in (("folded", True), ("covered", False)):
        made[name] = export(made["model"], scales, folder / name, fold_v_mean=fold, strategy=strategy).folder
    return made
