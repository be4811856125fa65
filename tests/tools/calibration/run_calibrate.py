"""One process of a calibration on several, for `test_calibrate_ranks.py`.

    python run_calibrate.py RANK SIZE FOLDER MODEL

It divides heads, then text. For each it writes the scales to `FOLDER/KIND/RANK-METHOD.safetensors`, with each method of `CASES`, and a
report to `FOLDER/KIND/RANK-report.json`.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from fp8attn import UsageError
from fp8attn_tools import calibrate, check_scales
from fp8attn_tools.calibration import calibrate as module

KINDS = "tensor", "data"
CASES = {"absmax": False, "percentile": True, "mse": True}  # by method, whether there are means


def ids():
    return torch.randint(0, 257, (6, 150), generator=torch.Generator().manual_seed(1))


def main(rank, size, folder, model):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    for kind in KINDS:
        run(kind, rank, size, folder / kind, model)
    dist.destroy_process_group()


def run(kind, rank, size, folder, model):
    if kind == "tensor":
        mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, tp_plan="auto", device_mesh=mesh)
        batches, groups = ids().split(1), {"tensor_parallel": dist.group.WORLD}
        with pytest.raises(UsageError, match="layer 0 has 1 KV heads in each of 1 processes, and the config says 2"):
            calibrate(loaded, batches[:1])
    else:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        batches, groups = ids().split([4, 2])[rank].split(1), {"data_parallel": dist.group.WORLD}  # other numbers of batches
    for method, means in CASES.items():
        scales = calibrate(loaded, batches, method=method, means=means, checkpoint=folder / "state.safetensors", **groups)
        scales.save(folder / f"{rank}-{method}.safetensors")
    held_out = torch.randint(0, 257, (1, 150), generator=torch.Generator().manual_seed(2))
    report = check_scales(loaded, [held_out], scales, tensor_parallel=groups.get("tensor_parallel"))
    (folder / f"{rank}-report.json").write_text(json.dumps(report.rows()))


if __name__ == "__main__":
    module.EVERY = 2
    rank, size, folder, model = sys.argv[1:]
    main(int(rank), int(size), Path(folder), model)
