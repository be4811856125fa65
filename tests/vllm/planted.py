"""A model with planted offsets and outliers (`evaluation.stress`), saved as a checkpoint that vLLM loads, and its calibrated export.

python -m tests.vllm.planted FOLDER [MODEL] [STRENGTH]    # FOLDER/model, FOLDER/folded, FOLDER/covered, FOLDER/windows.json
"""

import json
import sys
from pathlib import Path

import torch

from fp8attn import calibrate
from fp8attn.evaluation import models
from fp8attn.evaluation.stress import STRENGTHS, plant
from fp8attn.integrations.checkpoints import export

WINDOW = 512


def save_planted(model, tokenizer, folder, strength):
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


def prepare(folder, source=None, number=3, windows=2):
    """The planted checkpoint, and exports with V's mean moved and with a scale that covers it. Returns the folders."""
    model, tokenizer = models.load(source, device="cpu")
    tokens = models.tokenize(tokenizer, models.read_text(None, source or models.default_model()))
    folder = Path(folder)
    save_planted(model, tokenizer, folder / "model", STRENGTHS[number])
    model, _ = models.load(folder / "model", device="cpu")
    scales = calibrate(model, models.windows(tokens, 1024, 4, from_end=True).split(1), key_dtype="e4m3", rotate_keys=False)
    options = {} if getattr(scales.layer(0), "q_scale", None) is not None else {"q_scale": 1.0}
    made = {"model": folder / "model"}
    for name, fold in (("folded", True), ("covered", False)):
        made[name] = export(folder / "model", scales, folder / name, fold_v_mean=fold, **options).folder
    (folder / "windows.json").write_text(json.dumps(models.windows(tokens, WINDOW, windows).tolist()))
    return made


if __name__ == "__main__":
    arguments = sys.argv[1:]
    prepare(arguments[0], *(arguments[1:2] if arguments[1:2] != ["-"] else [None]), *map(int, arguments[2:]))
