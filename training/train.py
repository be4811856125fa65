"""Train the small model on one GPU for a given time.

    python training/train.py --minutes 15 --out .train/run

The schedules of the learning rate and of the context length follow the share of the time that has passed, so they
always complete. The newest state is kept in `<out>/state.pt`: started again with the same --out, the run goes on
from there. The weights of the best evaluation go to `<out>/best` in transformers' format.
"""

import argparse
import json
import math
import multiprocessing
import time
from pathlib import Path

import numpy as np
import torch
from data import ANSWER_TOKENS, CONFIG, SCRATCH, RecallTask, load_tokenizer, read_held_out, tokenise
from model import Llama, save_hf
from torch.utils.data import DataLoader, IterableDataset


class RecallBatches(IterableDataset):
    """Batches of recall contexts, made by worker processes for the lengths that are due at `progress`."""

    def __init__(self, tokenizer, tokens, settings, progress):
        self.tokenizer, self.tokens, self.settings, self.progress = tokenizer, tokens, settings, progress

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        task = RecallTask(self.tokenizer, self.tokens, [worker.seed % 2**32, worker.id], distinct=False)
        while True:
            stages = self.settings["curriculum"]
            stage = next((s for s in stages if self.progress.value < s["until"]), stages[-1])
            length = int(task.rng.choice(stage["lengths"]))
            rows = self.settings["tokens_per_step"] // length
            recall = max(1, round(rows * CONFIG["recall"]["fraction"]))
            yield rows, *task.batch(recall, length + 1)


class Evaluation:
    """Loss on the held-out modules and recall in them, measured now and then while training."""

    def __init__(self, tokenizer, settings, device):
        tokens = tokenise(tokenizer, [text for _, text in read_held_out()])
        longest = max(max(s["lengths"]) for s in settings["curriculum"])
        length = min(4096, longest)
        count = min(64, (len(tokens) - 1) // length)
        windows = [tokens[i * length : (i + 1) * length + 1].astype(np.int32) for i in range(count)]
        self.text = torch.from_numpy(np.stack(windows)).to(device)
        task, self.recall = RecallTask(tokenizer, tokens, 1, distinct=True), []
        for length in sorted({min(n, longest) for n in (512, 2048, 4096)}):
            rows = np.stack([task.row(length, 8, 1)[0] for _ in range(64)])
            self.recall.append((length, torch.from_numpy(rows).to(device)))

    @torch.no_grad()
    def __call__(self, model, dtype):
        model.eval()
        result = {"held_out": sum(model(part, dtype)[0].mean().item() for part in self.text.split(16)) / len(self.text.split(16))}
        for length, tokens in self.recall:
            hits = torch.cat([model(part, dtype)[1] for part in tokens.split(16)])
            result[f"recall_{length}"] = hits[:, -1 - ANSWER_TOKENS : -1].all(1).float().mean().item()
        model.train()
        return result


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True, help="training time, without compilation")
    parser.add_argument("--out", type=Path, required=True, help="folder for the log, the state and the weights")
    args = parser.parse_args()
    settings, recall = CONFIG["train"], CONFIG["recall"]
    args.out.mkdir(parents=True, exist_ok=True)

    def report(**values):
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()})
        print(line, flush=True)
        with open(args.out / "log.jsonl", "a") as log:
            log.write(line + "\n")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # BF16 products are slow on most CPUs
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(settings["seed"])
    tokenizer = load_tokenizer()
    stream = np.fromfile(SCRATCH / "train.bin", dtype=np.uint16)
    text = torch.from_numpy(stream.astype(np.int32)).to(device)
    progress = multiprocessing.Value("d", 0.0)
    batches = iter(
        DataLoader(
            RecallBatches(tokenizer, stream, settings, progress),
            batch_size=None,
            num_workers=settings["workers"],
            pin_memory=device == "cuda",
            prefetch_factor=2,
        )
    )
    evaluate = Evaluation(tokenizer, settings, device)

    model = Llama(CONFIG["model"], compiled=device == "cuda").to(device)
    optimizers = make_optimizers(model, settings)
    peak = [o.param_groups[0]["lr"] for o in optimizers]
    step, elapsed, tokens, best = 0, 0.0, 0, math.inf
    state = args.out / "state.pt"
    if state.exists():
        saved = torch.load(state, map_location=device)
        step, elapsed, tokens, best = saved["counts"]
        model.load_state_dict(saved["model"])
        for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
    report(
        parameters=sum(p.numel() for p in model.parameters()),
        device=device,
        step=step,
        torch=torch.__version__,
        gpu=torch.cuda.get_device_name() if device == "cuda" else None,
    )

    budget, fresh = args.minutes * 60, True
    now = last_log = last_eval = time.monotonic()
    logged_tokens = tokens
    while elapsed < budget:
        progress.value = elapsed / budget
        rows, contexts, learned = next(batches)
        length = contexts.shape[1] - 1
        plain = rows - len(contexts)
        starts = torch.randint(len(text) - length - 1, (plain, 1), device=device)
        inputs = torch.cat([text[starts + torch.arange(length + 1, device=device)], contexts.to(device, non_blocking=True)])
        learned = learned[:, 1:].to(device, non_blocking=True)

        # Only the text is seen again and again; the recall contexts are new each time and need no dropout.
        dropout = settings["dropout"] * (torch.arange(rows, device=device) < plain)
        losses, hits = model(inputs, dtype, dropout)
        text_loss = losses[:plain].mean()
        recall_loss = (losses[plain:] * learned).sum() / learned.sum()
        (text_loss + recall["loss_weight"] * recall_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        for optimizer, lr in zip(optimizers, peak, strict=True):
            optimizer.param_groups[0]["lr"] = lr * learning_rate(progress.value, settings)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + rows * length

        if fresh or step % 8 == 0:  # read the clock only now and then: it waits for the GPU
            if device == "cuda":
                torch.cuda.synchronize()
            before, now = now, time.monotonic()
            if not fresh:
                elapsed += now - before
            else:  # the first step compiles: it is not counted
                report(first_step_seconds=now - before)
                fresh, last_log, last_eval, logged_tokens = False, now, now, tokens
        if now - last_log > settings["log_seconds"]:
            report(
                step=step,
                tokens=tokens,
                progress=progress.value,
                length=length,
                text=text_loss.item(),
                recall=recall_loss.item(),
                recalled=hits[plain:][learned].float().mean().item(),
                tokens_per_second=(tokens - logged_tokens) / (now - last_log),
            )
            last_log, logged_tokens = now, tokens
        if now - last_eval > settings["eval_seconds"] or elapsed >= budget:
            result = evaluate(model, dtype)
            # Recall counts for as much as text: a percent of contexts missed weighs 0.01 nats.
            score = result["held_out"] + 1 - result[f"recall_{evaluate.recall[-1][0]}"]
            if score < best:
                best = score
                save_hf(model, args.out / "best")
            values = {
                "counts": (step, elapsed, tokens, best),
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
            }
            torch.save(values, state.with_suffix(".new"))
            state.with_suffix(".new").rename(state)
            last_eval = time.monotonic()
            report(step=step, tokens=tokens, elapsed=elapsed, **result, best=score == best)
            now = last_log = last_eval  # evaluation is not training time
            logged_tokens = tokens
    report(done=True, step=step, tokens=tokens, elapsed=elapsed)


if __name__ == "__main__":
    main()
