"""Prompts and decode steps in vLLM, with its caches in BF16 and FP8 and with the plugin: engines of three models' shapes.

    python -m benchmarks.vllm FOLDER [SECONDS] [MODEL:CACHE ...]    starts engines side by side, and lets one measure at a time
    python -m benchmarks.vllm FOLDER save                           writes what it found to results/<device>/vllm.json
    TINY=1 python -m benchmarks.vllm ...                            tiny layers, also on a CPU: whether all of it runs

It needs an environment with vLLM 0.26 or newer and this package; `qwen3.5` has patches for 0.26, and wants it. MODEL is of `models.MODELS`,
CACHE is `bf16`, `fp8` or `ours`. A row goes to FOLDER/rows.jsonl the moment it exists, logs to FOLDER/MODEL-CACHE.log. Weights are random,
and equal for all caches. Each engine first compares log-probabilities of prompts and of eight greedy tokens with those of `bf16`, which has
the first turn. Times are those of `LLM.generate` and of the engine's steps, with all that vLLM does around attention.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from evidence import results

from .models import MODELS, TINY

ORDER = [f"{model}:{cache}" for model in MODELS for cache in ("bf16", "ours", "fp8")]
TURN = 300 if TINY else 150  # seconds
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "2", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip


def main(out, seconds="390", *names):
    begun, seconds, names = time.time(), float(seconds), names or ORDER
    out.mkdir(parents=True, exist_ok=True)
    plugin = Path(tempfile.mkdtemp())  # so that vLLM finds the plugin of this checkout
    info = plugin / "fp8attn-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fp8attn\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nfp8attn = fp8attn.integrations.vllm:register\n")
    env = os.environ | ENVIRONMENT | {"PYTHONPATH": f"{plugin}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "benchmarks.vllm", str(out)]
    models = list(dict.fromkeys(name.partition(":")[0] for name in names))
    waves = [names] if memory() > 100 else [[n for n in names if n.startswith(model)] for model in models]
    ahead = [] if TINY else [start([*command, "compile", *models], env, out / "compile.log")]
    for number, wave in enumerate(waves):
        running = {}
        for name in wave:
            own = {"FP8ATTN_VLLM_CPU": str(int(":ours" in name)), "VLLM_CACHE_ROOT": str(plugin / plain(name))}
            running[name] = start([*command, "engine", name], env | own, out / f"{plain(name)}.log")
        end = begun + seconds * (number + 1) / len(waves)
        take_turns(running, out, patience=time.time() + 0.6 * (end - time.time()), end=end)
    for process in ahead:
        stop(process)
    print(f"{time.time() - begun:.0f} s", *map(str, (out / "rows.jsonl").read_text().splitlines()), sep="\n")


def memory():
    """GiB of the GPU; without one, as if all engines fit."""
    try:
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) / 1024
    except (OSError, subprocess.CalledProcessError, IndexError):
        return math.inf


def start(command, env, log):
    return subprocess.Popen(command, env=env, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)


def stop(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def take_turns(running, out, patience, end):
    """One engine measures at a time, when all have started or `patience` is over."""
    while running and time.time() < end:
        time.sleep(0.2)
        ready = [name for name in running if mark(out, name, "ready").exists()]
        if gone := [name for name in running if running[name].poll() is not None and name not in ready]:
            failed(out, gone[0], "ended before its turn")
            running.pop(gone[0])
        elif ready and (len(ready) == len(running) or time.time() > patience):
            name = ready[0]
            process = running.pop(name)
            mark(out, name, "turn").write_text(str(len(running) + 1 - len(ready)))  # how many others disturb it
            try:
                if process.wait(max(1, min(TURN, end - time.time()))):
                    failed(out, name, f"exit code {process.returncode}")
            except subprocess.TimeoutExpired:
                failed(out, name, "its turn was too long")
            stop(process)
    for name, process in running.items():
        failed(out, name, "no time left")
        stop(process)


def failed(out, name, why):
    log = (out / f"{plain(name)}.log").read_text(errors="replace").splitlines()
    write(out, name, {"case": "engine", "error": why, "log": [line[-300:] for line in log if "Error" in line][-4:] + log[-2:]})


def write(out, name, row):
    model, cache = name.split(":")
    with (out / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"model": model, "cache": cache} | row) + "\n")


def plain(name):
    return name.replace(":", "-")


def mark(out, name, kind):
    return out / f".{kind}-{plain(name)}"


def compile_ahead(out, models):
    """The kernels of these models, beside the start of the engines, which wait for this lock."""
    import torch
    import triton
    from filelock import FileLock

    from fp8attn import warmup

    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    for model in models:
        attention = ("window",) if model == "gemma3" else ()
        begun, shape = time.time(), MODELS[model]
        with FileLock(folder / "fp8attn.lock"):
            kernels = warmup(
                num_q_heads=shape["num_attention_heads"], num_kv_heads=shape["num_key_value_heads"], head_dim=shape["head_dim"],
                dtype=torch.bfloat16, attention=attention, advance=False,
            )  # fmt: skip
        write(out, f"{model}:ours", {"case": "compile", "kernels": len(kernels), "seconds": round(time.time() - begun, 1)})


def one_engine(out, name):
    from .engine import engine

    model, cache = name.split(":")

    def turn():
        mark(out, name, "ready").touch()
        while not (given := mark(out, name, "turn")).exists() or not given.read_text():
            time.sleep(0.1)
        return int(given.read_text())

    engine(model, cache, out, lambda row: write(out, name, row), turn)


IMPLS = {"bf16": "vllm-bf16", "fp8": "vllm-fp8", "ours": "fp8attn"}
KEPT = ("ms", "attention_ms", "kernels_ms", "steps", "nats_from_bf16", "tokens_equal")  # of a row


def save(out, folder=None):
    """Write the rows of engines whose answers were right to `results/<device>/vllm.json`, or into another folder of results."""
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    checks = [row for row in rows if row["case"] == "check" and "error" not in row]
    made = [
        {"case": f"{row['model']}-{row['case']}", "impl": IMPLS[row["cache"]], **{key: row[key] for key in KEPT if key in row}}
        for row in rows
        if "ms" in row or row in checks
    ]
    [(device, commit, versions)] = {(row["device"], row["commit"], tuple(row["versions"].items())) for row in checks}
    versions = dict(versions)
    head = results.header({"vllm": f"vllm {versions['vllm']}"}) | {
        "device": device, "commit": commit, "torch": versions["torch"], "triton": versions["triton"],
        "command": "python -m benchmarks.vllm FOLDER",
    }  # fmt: skip
    path = (folder or results.RESULTS) / results.slug(device) / "vllm.json"
    results.write(path, head, made)
    print(f"{len(made)} rows in {path}")
    for row in rows:
        if "error" in row:
            print(json.dumps(row))


if __name__ == "__main__":
    folder, *rest = sys.argv[1:]
    if rest[:1] == ["engine"]:
        one_engine(Path(folder), rest[1])
    elif rest[:1] == ["save"]:
        save(Path(folder))
    elif rest[:1] == ["compile"]:
        compile_ahead(Path(folder), rest[1:])
    else:
        main(Path(folder), *rest)
