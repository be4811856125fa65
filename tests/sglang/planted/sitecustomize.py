"""Plants a defect in fp8attn in each process with this folder in PYTHONPATH and a defect's name in PLANTED, also in
those of SGLang.

It is planted when the module is imported; in the second KV head, except "not rounded again".
"""

import importlib.abc
import importlib.util
import os
import sys

OWN_TOKEN, KEYS, VALUES, NOT_ROUNDED = "decodes miss their own token", "keys", "values", "not rounded again"
PLANTED = os.environ.get("PLANTED")
MODULE = "fp8attn.numerics" if PLANTED == NOT_ROUNDED else "fp8attn.integrations.engine.layer"
# in `numerics.settle`: codes of a page whose scale grows
ROUNDS = "again = torch.where(before[..., None], shifted, rounded)"


def _plant(module):
    layer, run = module.EngineLayer, module.EngineLayer.run

    def planted(self, q, k, v, out, step):
        if PLANTED in (KEYS, VALUES):
            k, v = k.clone(), v.clone()
            (k if PLANTED == KEYS else v)[:, 1] *= 1.05
        run(self, q, k, v, out, step)
        for part in step.parts if PLANTED == OWN_TOKEN else ():
            if part.max_seqlen == 1:
                pages = module.KVPages.trusted(
                    self.pool, part.page_table, (part.cache_seqlens - 1).clamp_min(1), self.format
                )
                half, tokens = q.shape[1] // 2, part.tokens
                out[tokens][:, half:] = module.ops.attention(q[tokens], pages, softmax_scale=self.softmax_scale)[
                    :, half:
                ]

    layer.run = planted


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader, load = spec.loader, spec.loader.exec_module

        def load_and_plant(module):
            if PLANTED == NOT_ROUNDED:
                source = loader.get_source(name)
                assert source.count(ROUNDS) == 1, "numerics.settle has changed"
                exec(
                    compile(source.replace(ROUNDS, ROUNDS.replace("shifted", "codes")), spec.origin, "exec"),
                    module.__dict__,
                )
            else:
                load(module)
                _plant(module)

        loader.exec_module = load_and_plant
        return spec


if PLANTED:
    sys.meta_path.insert(0, _Finder())
