"""What each form of an 8-bit page costs in quality: the simulation of 2026-11-page-forms.md, on a CPU.

    python docs/lab/page_forms.py MODEL FOLDER WINDOWS [CASES]     # run; FOLDER keeps the results, and a second run goes on from them
    python docs/lab/page_forms.py table FOLDER FORM                # the table's rows, with differences from FORM

MODEL is a folder of a transformers model, WINDOWS are numbers with commas, CASES is a regular expression. All but the roundings named here
is FP32. `decode` rounds K (rotated) and V as they are stored. `prefill` also rounds Q to INT8, and the weights P as the kernel does.
"""

import math
import re
import sys
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer

from fp8attn.formats.rotation import rotate
from fp8attn.integrations.transformers.biases import layer_biases

LENGTH, TILE = 2048, 128
GROUPS = {"page": 128, "32": 32, "token": 1}  # tokens that share a scale
PROSE = [f"/usr/share/vim/vim90/doc/usr_{number}.txt" for number in ("02", "03", "22", "27")]
CODE = [sysconfig.get_paths()["stdlib"] + "/argparse.py"]
WINDOWS = [(PROSE, 0), (PROSE, 4000), (CODE, 0), (PROSE, 8000), (PROSE, 12000)]  # files, and the first token


@dataclass(frozen=True)
class Form:
    """How K and V are stored: a dtype, the tokens of a scale, and how the scale is rounded or enlarged.

    Attributes:
        k_again, v_again: the tokens of a scale that prefill rounds the codes to once more. Empty: it reads the codes as they are stored.
        p: weights are integers in units of a tile's own largest "weight", or of its largest weight times V's scale ("product"), or
            are rounded without V's scale ("plain"), or are E4M3.
        first: layers before this one are not rounded once more.
        length: tokens of the window.
    """

    k: str
    v: str
    k_again: str = ""
    v_again: str = ""
    p: str = "weight"
    first: int = 0
    length: int = LENGTH


TOKEN = "int8 token bf16"
FORMS = {
    "exact K and V": Form("", ""),
    "1 today: page 1.25, E4M3 page": Form("int8 page 1.25", "e4m3 page power", p="e4m3"),
    "2 D: page 1.25, page 1.25": Form("int8 page 1.25", "int8 page 1.25"),
    "2 D exact: page, page": Form("int8 page", "int8 page"),
    "3 F: 32, page": Form("int8 32", "int8 page"),
    "4 32, 32": Form("int8 32", "int8 32"),
    "5 E: token, page": Form(TOKEN, "int8 page"),
    "5 B: page, token": Form("int8 page", TOKEN),
    "5 C: 32, token": Form("int8 32", TOKEN),
    "6 A: token, token": Form(TOKEN, TOKEN),
    "7 G: A, then page, page": Form(TOKEN, TOKEN, "page", "page"),
    "7 G: A, then page, token": Form(TOKEN, TOKEN, "page", ""),
    "7 G: A, then token, page": Form(TOKEN, TOKEN, "", "page"),
    "7 G: A, then 32, page": Form(TOKEN, TOKEN, "32", "page"),
    "7 G: A, then 32, 32": Form(TOKEN, TOKEN, "32", "32"),
    "8 E4M3 token, token": Form("e4m3 token bf16", "e4m3 token bf16"),
    "9 A, scales powers of two": Form("int8 token power", "int8 token power"),
    "4 32, 32; P of products": Form("int8 32", "int8 32", p="product"),
    "5 B: page, token; P of products": Form("int8 page", TOKEN, p="product"),
    "5 C: 32, token; P of products": Form("int8 32", TOKEN, p="product"),
    "6 A: token, token; P of products": Form(TOKEN, TOKEN, p="product"),
    "7 G: A, then page, token; P of products": Form(TOKEN, TOKEN, "page", "", p="product"),
    "6 A: token, token; P without V's scale": Form(TOKEN, TOKEN, p="plain"),
    "7 G: page, page, but layer 0 as A": Form(TOKEN, TOKEN, "page", "page", first=1),
    "7 G: 1,984 tokens": Form(TOKEN, TOKEN, "page", "page", length=1984),
}


def asked(name: str, form: Form, how: str) -> bool:
    """Decode reads what is stored: A's is G's. Prefill has no product of E4M3 V with integers."""
    if how == "decode":
        return bool(form.k) and not form.k_again and not form.v_again and form.p in ("weight", "e4m3")
    return not name.startswith("8")


CASES = [(name, how) for name, form in FORMS.items() for how in ("decode", "prefill") if asked(name, form, how)]
now: dict = {}  # what the attention does


def largest(x: torch.Tensor, group: int) -> torch.Tensor:
    """`x [heads, tokens, 1]`, the largest of each group for each of its tokens. The last group may have fewer."""
    tokens = x.shape[1]
    groups = pad(x, (0, 0, 0, -tokens % group)).unflatten(1, (-1, group))
    return groups.amax(2, keepdim=True).expand_as(groups).flatten(1, 2)[:, :tokens]


def store(x: torch.Tensor, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of `x [heads, tokens, head_dim]`, and the scale of each token `[heads, tokens, 1]`."""
    if not how:
        return x, torch.ones_like(x[..., :1])
    dtype, tokens, *rest = how.split()
    limit = 127 if dtype == "int8" else 448
    scale = largest(x.abs().amax(-1, keepdim=True).clamp_min(1e-20), GROUPS[tokens]) / limit
    if rest == ["bf16"]:  # up, so that nothing saturates
        scale = ((scale.contiguous().view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    elif rest == ["power"]:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    elif rest:
        scale = scale * float(rest[0])
    codes = (x / scale).clamp(-limit, limit)
    return (codes.round() if dtype == "int8" else codes.to(torch.float8_e4m3fn).float()), scale


def store_again(codes: torch.Tensor, scale: torch.Tensor, tokens: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes rounded once more, to the largest scale of a group. With the ratio in FP16 an FP16 multiply-add gives these integers."""
    if not tokens:
        return codes, scale
    shared = largest(scale, GROUPS[tokens])
    return (codes * (scale / shared).half().float()).round(), shared


def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, unit: torch.Tensor, form: Form, scaling: float) -> torch.Tensor:
    """Attention of `q [heads, group, tokens, head_dim]` on K, and V's codes and scales `unit`, with P rounded."""
    tokens = k.shape[1]
    k, v, unit = (pad(x, (0, 0, 0, -tokens % TILE)) for x in (k, v, unit))
    top = largest(unit, TILE)
    c = (unit / top.clamp_min(1e-30))[:, None, None, :, 0]  # V's scales of a tile beside its largest, [heads, 1, 1, keys]
    by_token = "token" in (form.v_again or form.v)
    out = []
    for begin in range(0, tokens, TILE):  # so the diagonal is in the last tile, and every tile has a weight in every row
        rows, end = q[:, :, begin:][:, :, :TILE], begin + TILE
        s = rows @ k[:, None, :end].mT * scaling
        s[..., begin:].masked_fill_(torch.ones(rows.shape[2], TILE, dtype=torch.bool).triu(1), -math.inf)
        s = s.unflatten(-1, (-1, TILE))
        m = s.amax(-1, keepdim=True)  # of a tile
        if form.p == "e4m3":  # 2^8 of the largest so far
            m = m.cummax(-2).values
            p = ((s - m).exp_() * 256).to(torch.float8_e4m3fn).float()
            sums = p
        else:
            w, here = (s - m).exp_() * 252, c[..., :end].unflatten(-1, (-1, TILE))
            p = w * here
            if form.p == "product":
                most = p.amax(-1, keepdim=True).clamp_min(1e-30) / 252
                p = (p / most).round_() * most
            else:
                p = w.round() * here if form.p == "plain" else p.round_()
            # The kernel sums rounded weights if it can divide by a few c. With c by token, a weight may have no bits left: not rounded.
            sums = w if by_token else p / here.clamp_min(1e-30)
        share = (m - m.amax(-2, keepdim=True)).exp_()  # of a tile's unit
        total = (sums * share).sum((-1, -2))[..., None]
        out.append((p * share).flatten(-2) @ (v * top)[:, None, :end] / total)
    return torch.cat(out, 2)


def attention(module, q, k, v, mask, scaling=None, dropout=0.0, **_):
    if form := now.get("form"):
        if module.layer_idx < form.first:
            form = replace(form, k_again="", v_again="")
        means = now["means"].get(module.layer_idx)
        # A constant that is subtracted from K changes every score of a row alike, and nothing else.
        k_mean, v_mean = (torch.zeros(1, 1) if means is None or x is None else x
                          for x in (getattr(means, "k_mean", None), getattr(means, "v_mean", None)))  # fmt: skip
        q = rotate(q)
        k, v = store(rotate(k[0] - k_mean[:, None]), form.k), store(v[0] - v_mean[:, None], form.v)
        if now["how"] == "prefill":
            k, (v, unit) = store_again(*k, form.k_again), store_again(*v, form.v_again)
            step = q.abs().amax(-1, keepdim=True) / 127
            q = ((q / step).round() * step)[0].unflatten(0, (len(v), -1))
            out = prefill(q, k[0] * k[1], v, unit, form, scaling) + v_mean[:, None, None]
            return out.flatten(0, 1).transpose(0, 1)[None], None
        k, v = (k[0] * k[1])[None], (v[0] * v[1] + v_mean[:, None])[None]
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2), None


AttentionInterface.register("page forms", attention)
AttentionMaskInterface.register("page forms", lambda *args, **kwargs: None)


def log_p(model, ids: torch.Tensor):
    """Log-probabilities, 256 rows at a time: 2,048 rows of Qwen's vocabulary have 1.2 GB."""
    hidden = model.model(ids, use_cache=False).last_hidden_state[0]
    for rows in hidden.split(256):
        yield model.lm_head(rows).log_softmax(-1)


def run(name: str, folder: Path, numbers: list[int], wanted: str) -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.set_flush_denormal(True)  # tiny weights are ten times as slow otherwise
    folder.mkdir(exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    now["means"] = layer_biases(model)
    model.set_attn_implementation("page forms")
    for number in numbers:
        files, begin = WINDOWS[number]
        text = "\n".join(Path(file).read_text(errors="replace") for file in files)
        ids = tokenizer(text, return_tensors="pt")["input_ids"][:, begin:][:, :LENGTH]
        now["form"] = None
        exact = list(log_p(model, ids))
        path = folder / f"{number}.pt"
        found = torch.load(path) if path.exists() else {}
        for case, how in CASES:
            if (case, how) in found or not re.search(wanted, f"{case}; {how}"):
                continue
            now.update(form=FORMS[case], how=how)
            start, kl, loss = time.time(), [], []
            cut = ids[:, : FORMS[case].length]
            for i, rows in enumerate(log_p(model, cut)):
                base = exact[i][: len(rows)]
                kl.append((base.exp() * (base - rows)).sum(-1))
                after = ids[0, 1 + 256 * i :][: len(rows)]
                loss.append((base - rows)[: len(after)].gather(1, after[:, None])[:, 0])
            found[case, how] = torch.cat(kl), torch.cat(loss)
            torch.save(found, path)
            print(number, case, how, f"{1e3 * torch.cat(kl).mean():.3f}", f"{time.time() - start:.1f} s", flush=True)


def mean(x: torch.Tensor) -> str:
    return f"{1e3 * x.mean():.2f} ± {1e3 * x.std() / len(x) ** 0.5:.2f}"


def table(folder: Path, beside: str) -> None:
    """KL in 1e-3 nats; the change of perplexity in %; KL by window; the difference of KL from the form `beside`; KL in the last page."""
    windows = {path.stem: torch.load(path) for path in sorted(folder.glob("?.pt"))}
    for case, how in CASES:
        found = {number: w[case, how] for number, w in windows.items() if (case, how) in w}
        if not found:
            continue
        kl, loss = (torch.cat(x) for x in zip(*found.values(), strict=True))
        row = [case, how, mean(kl), f"{100 * math.expm1(loss.mean()):+.2f} ± {100 * loss.std() / len(loss) ** 0.5:.2f}"]
        row.append(", ".join(f"{number}: {1e3 * x[0].mean():.2f}" for number, x in found.items()))
        if FORMS[case].length == LENGTH and all((beside, how) in windows[number] for number in found):
            row.append(mean(kl - torch.cat([windows[number][beside, how][0] for number in found])))
        row.append(f"positions 1,920 to 1,983: {mean(torch.cat([x[0][1920:1984] for x in found.values()]))}")
        print(" | ".join(row))


if __name__ == "__main__":
    if sys.argv[1] == "table":
        table(Path(sys.argv[2]), sys.argv[3])
    else:
        run(sys.argv[1], Path(sys.argv[2]), [int(x) for x in sys.argv[3].split(",")], *(sys.argv[4:] or [""]))
