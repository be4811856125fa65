"""Train the small model on one GPU or several of a host for a given time, in one run or several.

    python training/train.py --minutes 28 --out .train/run [--stop-after 540]
    torchrun --nproc-per-node 4 training/train.py --minutes 7 --out .train/run

The schedules of the learning rate and of the context length follow the share of `--minutes` that has passed. The state
is kept in `<out>/state.pt`, under 64 MiB: started again with the same --out and --minutes, on whatever machine, the run
goes on from there. The weights of the best evaluation at the greatest length so far go to `<out>/best` in transformers'
format.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from data import CONFIG, SCRATCH, load_tokenizer, read_held_out, read_words, tokenize
from model import Model, save_hf
from retrieval import RetrievalTask
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from twin import make_twin, small_model

# In order of choice. cuDNN's is the faster on Hopper, where attention is most of a long step; none but these two is an
# option there, since the others hold scores of [length, length].
FAST_ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def check_lengths(settings):
    """Raises ValueError if a step has no room for a context of the curriculum."""
    longest, room = (
        max(length for stage in settings["curriculum"] for length in stage["lengths"]),
        settings["tokens_per_step"],
    )
    if longest > room:
        raise ValueError(
            f"config.json: the curriculum has contexts of {longest:,} tokens, and a step has {room:,} "
            f"(train.tokens_per_step): set tokens_per_step to {longest} or more, or take longer lengths out of "
            f"train.curriculum"
        )


def due(settings, progress):
    """The stage of the curriculum at `progress`."""
    stages = settings["curriculum"]
    return next((stage for stage in stages if progress < stage["until"]), stages[-1])


class RetrievalBatches(IterableDataset):
    """Batches of retrieval contexts, made by worker processes for the lengths that are due at `progress`."""

    def __init__(self, tokenizer, words, text, settings, progress, seed, share):
        self.tokenizer, self.words, self.text, self.settings, self.progress = tokenizer, words, text, settings, progress
        self.seed, self.share = seed, share

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        task = RetrievalTask(self.tokenizer, self.words, self.text, [worker.seed % 2**32, worker.id])
        for step in itertools.count(worker.id, worker.num_workers):
            stage = due(self.settings, self.progress.value)
            # All processes take the same length in a step, or they would wait for each other.
            length = int(np.random.default_rng([self.seed, step]).choice(stage["lengths"]))
            whole = self.settings["tokens_per_step"]
            rows = (
                whole // self.share // length or whole // length
            )  # no third number of tokens, which would be compiled for
            retrieval = int(rows * stage["retrieval"] + task.rng.random())  # a step of one row is the one or the other
            empty = np.zeros((0, length + 1), np.int32), np.zeros((0, length + 1), bool)
            yield rows, *(task.batch(retrieval, length + 1, forms=stage["forms"]) if retrieval else empty)


class Evaluation:
    """Loss on the held-out modules, and the share of `niah_multikey_2` contexts answered, at each length that was
    trained so far.
    """

    def __init__(self, tokenizer, words, settings, device):
        self.settings, self.device = settings, device
        tokens = tokenize(tokenizer, [text for _, text in read_held_out()])
        length = 4096
        windows = [
            tokens[i * length : (i + 1) * length + 1].astype(np.int32)
            for i in range(min(64, (len(tokens) - 1) // length))
        ]
        self.text = torch.from_numpy(np.stack(windows))
        self.task = RetrievalTask(tokenizer, words, tokens, 1)
        self.retrieval = {}

    @torch.no_grad()
    def __call__(self, model, dtype, progress):
        model.eval()
        parts = self.text.split(16)
        result = {"held_out": sum(model(part.to(self.device), dtype)[0].mean().item() for part in parts) / len(parts)}
        longest = max(
            length
            for stage in self.settings["curriculum"]
            for length in stage["lengths"]
            if stage_begins(self.settings, stage) <= progress
        )
        for length in (256, 2048, 8192, 32768, 131072):
            if length <= longest:
                count = max(16, min(64, 2**19 // length))
                if length not in self.retrieval:
                    made = self.task.batch(count, length + 1, ruler_only=True)
                    self.retrieval[length] = [torch.from_numpy(x) for x in made]
                contexts, learned = self.retrieval[length]
                rows = max(1, 2**17 // length)
                hits = torch.cat([model(part.to(self.device), dtype)[1].cpu() for part in contexts.split(rows)])
                result[f"retrieval_{length}"] = (hits | ~learned[:, 1:]).all(1).float().mean().item()
        model.train()
        return result


def stage_begins(settings, stage):
    """The progress at which a stage of the curriculum begins."""
    return max((other["until"] for other in settings["curriculum"] if other["until"] < stage["until"]), default=0.0)


def make_optimizers(model, settings):
    """Muon for the matrices of the layers, AdamW for the embeddings and the norms."""
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2 or p is model.embed]
    return [
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **settings["muon"]),
        torch.optim.AdamW(others, fused=others[0].is_cuda, **settings["adamw"]),
    ]


def learning_rate(progress, settings):
    """The factor on the learning rates: a linear warm-up, then a cosine."""
    if progress < settings["warmup"]:
        return max(progress / settings["warmup"], 1e-2)
    done = (progress - settings["warmup"]) / (1 - settings["warmup"])
    return settings["final_lr"] + (1 - settings["final_lr"]) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def compact(optimizer):
    """An optimizer's state with its moments in bfloat16: half the bytes of a state that may have to travel."""
    state = optimizer.state_dict()
    state["state"] = {
        key: {name: x.bfloat16() if torch.is_tensor(x) and x.ndim else x for name, x in values.items()}
        for key, values in state["state"].items()
    }
    return state


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, required=True, help="training time of all runs together, without compilation"
    )
    parser.add_argument(
        "--stop-after",
        type=float,
        default=math.inf,
        help="seconds, all told, after which this run saves its state and ends",
    )
    parser.add_argument("--latent", action="store_true", help="train the small model's twin with latent attention")
    parser.add_argument("--out", type=Path, required=True, help="folder for the log, the state and the weights")
    args = parser.parse_args()
    with sdpa_kernel(FAST_ATTENTION, set_priority=True) if torch.cuda.is_available() else nullcontext():
        train(args)


def train(args):
    """One run: from the last state to the end of the budget, or of this run's time. Every GPU has a process, and the
    first one reports.
    """
    began = time.monotonic()
    settings = CONFIG["train"] | (CONFIG["train_latent"] if args.latent else {})
    check_lengths(settings)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, share = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if share > 1:
        if device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    args.out.mkdir(parents=True, exist_ok=True)

    def report(**values):
        if rank:
            return
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()})
        print(line, flush=True)
        with open(args.out / "log.jsonl", "a") as log:
            log.write(line + "\n")

    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # BF16 products are slow on most CPUs
    torch.set_float32_matmul_precision("high")
    tokenizer, (words, unseen_words) = load_tokenizer(), read_words()
    stream = np.fromfile(SCRATCH / "train.bin", dtype=np.uint16)
    text = torch.from_numpy(stream.astype(np.int32)).to(device)

    torch.manual_seed(settings["seed"])
    if args.latent:  # texts and retrieval, as they come in training
        plain = stream[: 8 * 1024].astype(np.int32).reshape(8, 1024)
        asked, _ = RetrievalTask(tokenizer, words, stream, settings["seed"]).batch(8, 1024)
        model = make_twin(small_model(), torch.from_numpy(np.concatenate((plain, asked))), compiled=device == "cuda")
    else:
        model = Model(CONFIG["llama"], compiled=device == "cuda")
    model.to(device)
    optimizers = make_optimizers(model, settings)
    peak = [o.param_groups[0]["lr"] for o in optimizers]
    step, elapsed, tokens, best = 0, 0.0, 0, (0, math.inf)
    state = args.out / "state.pt"
    if state.exists():
        saved = torch.load(state, map_location=device)
        step, elapsed, tokens, best = saved["counts"]
        model.load_state_dict(saved["model"])
        for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
    torch.manual_seed(
        settings["seed"] + step * share + rank
    )  # other texts and contexts than another run or process has
    budget = args.minutes * 60
    progress = multiprocessing.Value("d", elapsed / budget)
    batches = iter(
        DataLoader(
            RetrievalBatches(tokenizer, words, stream, settings, progress, settings["seed"] + step, share),
            batch_size=None,
            num_workers=settings["workers"],
            pin_memory=device == "cuda",
            prefetch_factor=2,
        )
    )
    evaluate = Evaluation(tokenizer, unseen_words, settings, device)
    run = DistributedDataParallel(model) if share > 1 else model
    report(
        parameters=sum(p.numel() for p in model.parameters()),
        device=device,
        processes=share,
        step=step,
        elapsed=elapsed,
        torch=torch.__version__,
        gpu=torch.cuda.get_device_name() if device == "cuda" else None,
    )

    def read_clock():
        if device == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    def save():
        values = {
            "counts": (step, elapsed, tokens, best),
            "model": model.state_dict(),
            "optimizers": [compact(o) for o in optimizers],
        }
        torch.save(values, state.with_suffix(".new"))
        state.with_suffix(".new").rename(state)

    compiled, idle, over = set(), 0.0, False
    now = last_log = last_eval = read_clock()
    logged_tokens = tokens
    while not over:
        progress.value = elapsed / budget
        rows, contexts, learned = next(batches)
        length = contexts.shape[1] - 1
        plain = rows - len(contexts)
        fresh = length not in compiled  # attention plans and kernels of a new length: that time is not counted
        if fresh:
            compiled.add(length)
            fresh_began = read_clock()
        starts = torch.randint(len(text) - length - 1, (plain, 1), device=device)
        inputs = torch.cat(
            [text[starts + torch.arange(length + 1, device=device)], contexts.to(device, non_blocking=True)]
        )
        learned = learned[:, 1:].to(device, non_blocking=True)

        # Only the text is seen again and again; the retrieval contexts are new each time and need no dropout.
        dropout = settings["dropout"] * (torch.arange(rows, device=device) < plain)
        losses, hits = run(inputs, dtype, dropout)
        # A step that is all of one kind (one long row) weighs it as much as it would weigh beside the other.
        text_loss = losses[:plain].mean() if plain else losses.new_zeros(())
        retrieval_loss = (losses[plain:] * learned).sum() / learned.sum() if len(contexts) else losses.new_zeros(())
        (text_loss + settings["retrieval_weight"] * retrieval_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        for optimizer, lr in zip(optimizers, peak, strict=True):
            optimizer.param_groups[0]["lr"] = lr * learning_rate(progress.value, settings)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + rows * length * share
        if fresh:
            idle += read_clock() - fresh_began
            report(first_step_seconds=idle, length=length)
        if step % 8:  # the clock is read only now and then: that waits for the GPU
            continue

        before, now = now, read_clock()
        elapsed, idle = elapsed + now - before - idle, 0.0
        over = elapsed >= budget or now - began >= args.stop_after
        if share > 1:
            clock = [elapsed, over]
            dist.broadcast_object_list(clock)
            elapsed, over = clock
        if now - last_log > settings["log_seconds"] and len(contexts):
            report(
                step=step,
                tokens=tokens,
                progress=progress.value,
                length=length,
                text=text_loss.item() if plain else None,
                retrieval=retrieval_loss.item(),
                retrieved=hits[plain:][learned].float().mean().item(),
                tokens_per_second=(tokens - logged_tokens) / (now - last_log),
            )
            last_log, logged_tokens = now, tokens
        if rank == 0 and (now - last_eval > settings["eval_seconds"] or over):
            result = evaluate(model, dtype, progress.value)
            # Retrieval counts for as much as text: a percent of contexts missed weighs 0.01 nats. A greater length
            # comes first.
            *_, (name, right) = result.items()
            score = result["held_out"] + 1 - right
            longest = int(name.removeprefix("retrieval_"))
            better = (-longest, score) < (-best[0], best[1])
            if better:
                best = (longest, score)
                save_hf(model, args.out / "best")
            save()
            last_eval = time.monotonic()
            report(step=step, tokens=tokens, elapsed=elapsed, **result, best=better)
            now = last_log = last_eval  # evaluation is not training time
            logged_tokens = tokens
    report(done=elapsed >= budget, step=step, tokens=tokens, elapsed=elapsed)
    if share > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
