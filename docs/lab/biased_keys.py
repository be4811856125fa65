"""What a static mean of K is worth to INT8 keys: the simulation of 2026-11-biased-keys.md, on a CPU.

    python docs/lab/biased_keys.py MODEL FOLDER WINDOWS CASES

MODEL is a folder of a transformers model, FOLDER keeps the exact run, CASES is a regular expression. K after RoPE, less a mean, is rotated
and rounded to INT8. V, less the mean of today's rule, is rounded to E4M3 or INT8. All else is FP32. Each case is beside exact attention.
Cases of "layer 0" change that layer alone: 16 bits, a mean over fewer positions, or E4M3 keys that are not rotated.
"""

import json
import math
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer

from fp8attn.formats.rotation import rotate
from fp8attn.integrations.transformers.biases import _attentions, _offset, layer_biases
from fp8attn.scales import SEVERAL

LENGTH = 1024  # tokens of a window
PAGE, HEADROOM = 128, 1.25  # of the scale of an INT8 page
FORMATS = {"page": ("int8 page", "e4m3 page"), "token": ("int8 token", "int8 token")}  # of K and V
TEXTS = {
    "vim's manual": [f"/usr/share/vim/vim90/doc/usr_{number}.txt" for number in ("02", "03", "22", "27")],
    "argparse.py": [sysconfig.get_paths()["stdlib"] + "/argparse.py"],
    "kernels.md": ["docs/kernels.md"],
    "cache.py": ["src/fp8attn/integrations/transformers/cache.py"],
}
Means = dict[int, torch.Tensor]  # by layer, [num_kv_heads, head_dim]
now: dict = {}  # what the attention does


def pairs(x: torch.Tensor) -> torch.Tensor:
    """The channels that RoPE rotates together, as complex numbers."""
    return torch.complex(*x.double().chunk(2, -1))


def channels(z: torch.Tensor) -> torch.Tensor:
    return torch.cat([z.real, z.imag], -1).float()


def positions(context: int, lengths: bool) -> torch.Tensor:
    """4,096 positions below `context`: evenly spread, or with `lengths` random ones of contexts of random lengths."""
    if not lengths:
        return ((torch.arange(4096).double() + 0.5) / 4096 * context).floor()
    length, part = torch.rand(2, 4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (context * length * part).floor()


class Rules:
    """The means of a model by each rule."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.frequency = model.model.rotary_emb.inv_freq.double()
        self.context = model.config.max_position_embeddings
        self.layers = list(_attentions(model))
        self.bias = {i: found for i, a, n in self.layers if (found := _offset(a, "k", n)) is not None}

    def biases(self, context=None, several=SEVERAL, harmless=True, lengths=False, offset=None) -> Means:
        """The bias after RoPE, averaged over positions. `offset`: in the place of biases."""
        found = {}
        for index, (added, deviation) in (offset or self.bias).items():
            b, size = pairs(added), pairs(deviation).abs() / 2**0.5
            x = b[:, None] * torch.exp(1j * positions(context or self.context, lengths)[:, None] * self.frequency)
            mean = x.mean(1)
            used = (mean.abs() >= several * size) & (not harmless or (x - mean[:, None]).abs().amax(1) <= b.abs())
            found[index] = channels(torch.where(used, mean, 0))
        return found

    def seen(self, window: dict, count: int) -> Means:
        """The mean of K after RoPE of the first `count` tokens of the window."""
        return {i: k[:, :count].mean(1) for i, k in window["keys"].items()}

    def projected(self, ids: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The mean of K before RoPE over the tokens of a forward, the bias included, in the place of a bias."""
        seen = {}
        hooks = [a.k_proj.register_forward_hook(lambda m, args, out, i=i: seen.update({i: out[0].mean(0)})) for i, a, _ in self.layers]
        self.model(ids, use_cache=False, logits_to_keep=1)
        for hook in hooks:
            hook.remove()
        head_dim = self.layers[0][1].head_dim
        zero = torch.zeros(self.model.config.num_key_value_heads, head_dim)
        return {i: (mean.unflatten(0, (-1, head_dim)), zero) for i, mean in seen.items()}

    def random(self, **how) -> Means:
        """`biases` of the mean of K over random tokens."""
        ids = torch.randint(self.model.config.vocab_size, (1, 256), generator=torch.Generator().manual_seed(0))
        return self.biases(several=0.0, harmless=False, offset=self.projected(ids), **how)


def rounded(x: torch.Tensor, how: str) -> torch.Tensor:
    """`x [heads, tokens, head_dim]` in 8 bits."""
    dtype, scale = how.split()
    largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-20)
    if scale == "page":
        largest = largest.unflatten(1, (-1, PAGE)).amax(2, keepdim=True).expand(-1, -1, PAGE, -1).flatten(1, 2)
    if dtype == "e4m3":
        step = torch.exp2(torch.ceil(torch.log2(largest / 448)))
        return (x / step).to(torch.float8_e4m3fn).float() * step
    step = largest / 127 * (HEADROOM if scale == "page" else 1)
    return (x / step).round().clamp(-127, 127) * step


def attention(module, q, k, v, mask, scaling=None, dropout=0.0, **_):
    index = module.layer_idx
    if "keys" in now:
        now["keys"][index] = k[0].clone()
    if "format" in now and index not in now["skip"]:
        if now["start"]:  # the same tokens at later positions: scores depend on the distance alone
            turn = torch.exp(1j * now["start"] * now["frequency"])
            q, k = channels(pairs(q) * turn), channels(pairs(k) * turn)
        # A constant that is subtracted from K changes every score of a row alike, and nothing else.
        k_format, v_format = FORMATS[now["format"]]
        k_mean, v_mean = (now[of].get(index, torch.zeros(1, 1))[:, None] for of in ("k_mean", "v_mean"))
        if index in now["e4m3"]:
            k = rounded(k[0] - k_mean, "e4m3 " + k_format.split()[1])[None]
        else:
            q, k = rotate(q), rounded(rotate(k[0] - k_mean), k_format)[None]
        v = (rounded(v[0] - v_mean, v_format) + v_mean)[None]
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2), None


AttentionInterface.register("simulated", attention)
AttentionMaskInterface.register("simulated", lambda *args, **kwargs: None)


def exact(model, tokenizer, folder: Path, count: int) -> Iterator[dict]:
    """The windows: ids, log-probabilities and K of every layer, from the files of an earlier run or a new one."""
    folder.mkdir(exist_ok=True)
    for number in range(count):
        path, (name, files) = folder / f"{number}.pt", list(TEXTS.items())[number % len(TEXTS)]
        if not path.exists():
            ids = tokenizer("\n".join(Path(file).read_text(errors="replace") for file in files), return_tensors="pt")["input_ids"][0]
            begin = number // len(TEXTS) * 4000 % (len(ids) - LENGTH)
            now.clear()
            now["keys"] = {}
            window = {"name": name, "ids": ids[begin:][:LENGTH][None]}
            window["log_p"] = model(window["ids"], use_cache=False).logits[0].log_softmax(-1)
            torch.save({**window, "keys": dict(now["keys"])}, path)
        yield torch.load(path, mmap=True)


def main() -> None:
    name, folder, count, wanted_cases = sys.argv[1:]
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    model.set_attn_implementation("simulated")
    windows = list(exact(model, AutoTokenizer.from_pretrained(name), Path(folder), int(count)))
    rules = Rules(model)
    v_mean = {i: found.v_mean for i, found in layer_biases(model).items() if found.v_mean is not None}
    now.clear()
    g = {"lengths": True, "harmless": False}
    cases = {
        "no mean": dict,
        "oracle": lambda: lambda window: rules.seen(window, LENGTH),
        "a: today": rules.biases,
        "a: today; layer 0 exact": rules.biases,
        "a: today; layer 0 e4m3": rules.biases,
        "a: today; layer 0 e4m3, no mean": lambda: rules.biases() | {0: torch.zeros(1, 1)},
        **{f"a: today; layer 0 to {n:,}": lambda n=n: rules.biases() | {0: rules.biases(n)[0]} for n in (1024, 4096)},
        "a: today; late": rules.biases,
        "a, to 131,072": lambda: rules.biases(131072),
        "b: to 1,024": lambda: rules.biases(LENGTH),
        "b + c: 0": lambda: rules.biases(LENGTH, several=0.0),
        **{f"c: {several:g}": lambda several=several: rules.biases(several=several) for several in (0.0, 0.5, 1.0, 2.0)},
        "d: not harmless": lambda: rules.biases(harmless=False),
        "e: random": rules.random,
        "e: random, to 1,024": lambda: rules.random(context=LENGTH),
        "e + g": lambda: rules.random(lengths=True),
        "f: first 128": lambda: lambda window: rules.seen(window, 128),
        "g: lengths": lambda: rules.biases(**g),
        "g + c: 0": lambda: rules.biases(several=0.0, **g),
        "g + c: 0; late": lambda: rules.biases(several=0.0, **g),
        "g + c: 0, to 131,072": lambda: rules.biases(131072, several=0.0, **g),
    }
    for case, make in cases.items():
        found = None
        for form in FORMATS:
            if not re.search(wanted_cases, f"{case}; {form}"):
                continue
            found = make() if found is None else found
            kl, loss = [], []
            for window in windows:
                now.update(format=form, k_mean=found(window) if callable(found) else found, v_mean=v_mean, frequency=rules.frequency)
                now.update(start=24576 if "late" in case else 0, skip={0} if "layer 0 exact" in case else ())
                now.update(e4m3={0} if "layer 0 e4m3" in case else ())
                log_p, wanted, ids = (
                    model(window["ids"], use_cache=False).logits[0].log_softmax(-1),
                    window["log_p"],
                    window["ids"][0, 1:, None],
                )
                kl.append((wanted.exp() * (wanted - log_p)).sum(-1))
                loss.append((wanted - log_p)[:-1].gather(1, ids)[:, 0])
                now.clear()
            kl, loss = torch.cat(kl), torch.cat(loss)
            row = {"kl": 1e3 * kl.mean().item(), "kl_by_window": [1e3 * x.mean().item() for x in kl.split(LENGTH)]}
            row |= {"d_ppl": 100 * math.expm1(loss.mean().item()), "se": 100 * loss.std().item() / len(loss) ** 0.5}
            print(json.dumps({"case": case, "format": form} | row), flush=True)


if __name__ == "__main__":
    main()
