"""What a serving engine needs of fp8attn, whatever the engine is.

An engine has blocks of 128 tokens, tables of them, and the lengths of its sequences. A block is a page. fp8attn needs
the memory of the blocks, and the sequences of each step:

    # When the weights are loaded:
    layer = EngineLayer(32, 8, 128, options=options, static=static_state(...), device=device)
    warm_up([layer, ...], dtype, device)
    layer.bind(allocation)  # its blocks, [num_blocks, ...]
    # Once a step, for all layers:
    step = step_of(lengths, tables, bounds, ...)
    # In each layer:
    layer.run(q, k, v, out, step)

| file | what |
|---|---|
| `options.py` | the options that users give |
| `static.py` | what is static in a layer's pages: means and scales, from a file or from biases |
| `biases.py` | static means from the biases of a checkpoint |
| `steps.py` | the sequences of a step, in parts: decodes, then prompts |
| `layer.py` | a layer: its pages in the engine's memory, then append and attention |
| `marks.py` | blocks of other engines: the mark that tells formats apart |
| `warm.py` | kernels, compiled before the first request |

`integrations/vllm/` and the distribution `fp8attn-sglang` (`plugins/sglang`) are plugins of engines on top of this, and
`tests/integrations/engine/toy.py` a whole small engine. Nothing here imports an engine. Messages go to the logger of
this package: an engine that shows only its own gives it its handlers.
"""

from .layer import EngineLayer
from .options import Options
from .static import ServedModel, StaticState, static_state
from .steps import Step, StepPart, step_of
from .warm import warm_up

__all__ = [
    "EngineLayer",
    "Options",
    "ServedModel",
    "StaticState",
    "Step",
    "StepPart",
    "static_state",
    "step_of",
    "warm_up",
]
