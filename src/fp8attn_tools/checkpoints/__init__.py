"""Calibrated scales in checkpoints: what stock vLLM, without fp8attn, reads for its own FP8 KV cache.

    from fp8attn_tools.checkpoints import check, export
    export("Llama-3.1-8B", scales, "Llama-3.1-8B-FP8-KV")   # a folder beside the original, which links to its weights
    check("Llama-3.1-8B-FP8-KV")                            # every layer has every scale, in the form that vLLM reads

vLLM takes 1.0 for a scale that it does not find, mostly without a warning. So both functions raise an error for a scale
that is missing, renamed or in a file that the index does not name. Nothing here imports vLLM.

| file | what |
|---|---|
| `folder.py` | the config and the tensors of a checkpoint's folder |
| `attentions.py` | the attention modules of a checkpoint |
| `formats.py` | the names and shapes in which vLLM reads scales, and the config |
| `fold.py` | V's means, moved into biases |
| `overlay.py`, `check.py` | `export` writes the folder; `check` reads one back |
| `recipe.py` | which layers are in 8 bits, as ModelOpt's metadata |
"""

from .check import Export, check
from .formats import STRATEGIES
from .overlay import export

__all__ = ["STRATEGIES", "Export", "check", "export"]
