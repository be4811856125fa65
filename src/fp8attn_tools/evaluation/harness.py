"""Any task of lm-eval through a cache: `lm_eval.simple_evaluate(CachedLM(model, tokenizer, make_cache),
tasks=[...])`.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from fp8attn.integrations.transformers.config import cache_keyword

from .caches import CHUNK, MakeCache, forward


class CachedLM(HFLM):
    """lm-eval's model for transformers, with all K and V read through a cache.

    lm-eval's own model computes likelihoods in one forward, without a cache. Here, every call starts from an empty
    cache and runs in chunks.

    Args:
        model: a transformers causal language model, such as `models.load` gives.
        make_cache: makes an empty cache (`caches.cache_factory`).
        chunk: tokens of a prefill's forward.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        make_cache: MakeCache,
        *,
        chunk: int = CHUNK,
        batch_size: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, **options)
        self.make_cache, self.chunk = make_cache, chunk

    def _model_call(
        self, inps: torch.Tensor, attn_mask: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits `[B, S, vocabulary]` of `inps [B, S]`. lm-eval pads on the right, which a causal model
        does not see.
        """
        if attn_mask is not None or labels is not None:
            raise ValueError(
                "CachedLM takes causal models only, without attn_mask and labels; got an encoder-decoder's call"
            )
        cache = self.make_cache()
        return torch.cat([forward(self.model, part, cache) for part in inps.split(self.chunk, 1)], 1)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """The continuations of `context [B, S]`, with lm-eval's arguments."""
        cached = {cache_keyword(self.model): self.make_cache(), "prefill_chunk_size": self.chunk}
        return super()._model_generate(context, max_length, stop, **cached, **generation_kwargs)
