"""`fp8attn generate`: continue a prompt, through one cache or several."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fp8attn.errors import UsageError
from fp8attn.formats.page_layout import PAGE_SIZE

from .options import MOST_TOKENS, CacheChoice, Device, Json, Model, Scales, Seed
from .shared import choose, encode, load, makers, out, print_json


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    model: Model = None,
    cache: CacheChoice = "fp8",
    scales: Scales = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(help="Tokens to generate, at most; never more than the model's context.", min=1, max=MOST_TOKENS),
    ] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Of the sampling; 0 is greedy.")] = 0.0,
    seed: Seed = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt, through one cache or several. The text appears while it is generated."""
    import torch
    from transformers import TextStreamer

    from fp8attn.integrations.transformers.config import cache_keyword

    from ..calibration.pack import context_of
    from ..evaluation.names import title

    class Stream(TextStreamer):
        """Prints text when its words are complete."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            out.print(text, end="\n" if stream_end else "", markup=False, highlight=False, soft_wrap=True)

    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # Python keeps bytes of arguments that are no UTF-8 as surrogates
        raise UsageError(f"the prompt is not UTF-8 from character {error.start} on: pass text in UTF-8") from error
    chosen = choose(cache, scales)
    loaded, tokenizer = load(model, device)
    caches = makers(chosen, loaded)
    inputs = encode(tokenizer, prompt, chat).to(loaded.device)
    count = room(loaded.config, inputs["input_ids"].shape[1], max_new_tokens)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    rows: list[dict[str, Any]] = []
    for name, make in caches.items():
        torch.manual_seed(seed)
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        made, stream = make(), None
        if not as_json:
            out.rule(f"{title(name)} cache", align="left")
            out.print("" if chat else prompt, end="", markup=False, highlight=False, soft_wrap=True)
            stream = Stream(tokenizer, skip_prompt=True, skip_special_tokens=True)
        options: dict[str, Any] = {"max_new_tokens": count, "pad_token_id": pad, "streamer": stream}
        try:
            ids = loaded.generate(**inputs, **{cache_keyword(loaded): made}, **options, **sampling)
        except KeyboardInterrupt:
            if stream is not None:
                stream.end()  # the words that it holds back
            raise
        new = ids[0, inputs["input_ids"].shape[1] :].tolist()
        at_end = len(new) == count < max_new_tokens
        size = getattr(made, "nbytes", None)
        rows.append(
            {
                "cache": name,
                "text": tokenizer.decode(new),
                "tokens": new,
                "cache_bytes": size,
                "context_is_full": at_end,
            }
        )
        if as_json:
            continue
        if at_end:
            out.print(
                f"[dim]stopped after {count} tokens: the model's context is full "
                f"({context_of(loaded.config, MOST_TOKENS):,} tokens)"
            )
        if size is not None:
            out.print(
                f"[dim]the cache holds {size:,} "
                f"bytes{f' in whole pages of {PAGE_SIZE} tokens' if hasattr(made, 'fp8_layers') else ''}"
            )
    same = all(row["tokens"] == rows[0]["tokens"] for row in rows)
    if as_json:
        print_json({"prompt": prompt, "rows": rows, "tokens_equal": same})
    elif len(rows) > 1:
        out.rule("the same tokens" if same else "different tokens", align="left")


def room(config: Any, prompt: int, wanted: int) -> int:
    """How many of the `wanted` tokens fit into the model's context after a prompt.

    Raises:
        UsageError: not one.
    """
    from ..calibration.pack import context_of

    longest = context_of(config, MOST_TOKENS)
    if prompt >= longest:
        raise UsageError(
            f"the prompt has {prompt:,} tokens, and the model's context is {longest:,}: shorten the prompt"
        )
    return min(wanted, longest - prompt)
