"""Compares the outputs of a model with a BF16 cache and with 8-bit caches, on the same tokens.

| module | is |
|---|---|
| `models`, `public` | models and texts |
| `caches` | the caches by name, and running a model with one |
| `perplexity` | loss, KL divergence and agreement of predictions |
| `needle`, `outcomes`, `recall`, `ruler` | retrieval: runs, scores, and two sources of questions |
| `paired` | intervals and tests of paired outcomes |
| `drift` | long decoding while pages are copied, reordered and truncated |
| `sensitivity` | what 8 bits cost in each layer, and which layers to leave in 16 bits |
| `harness` | a model for lm-eval whose calls all go through a cache |
| `names` | the names of caches and tasks, without imports |
| `record` | results as JSON, with the versions, device and date of the run |

Functions return dataclasses. `fp8attn_tools.cli` draws them. These modules need the extra `hf`; `ruler` and `harness`
need the extra `ruler`.
"""
