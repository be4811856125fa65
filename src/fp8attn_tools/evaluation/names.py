"""The names of caches and tasks, without imports, so that the command line can show them at once."""

CACHES = {  # by name, the title in tables and pictures
    "bf16": "BF16",
    "fp8": "FP8",
    "fp8-int8-keys": "INT8 keys",
    "fp8-e4m3-keys": "E4M3 keys",
    "fp8-e4m3-plain": "E4M3 plain",
    "fp8-static": "FP8 static",
    "scale-1": "plain cast",
    "transformers-fp8": "HF FP8",
}
UNIFORM = ("bf16", "transformers-fp8")  # caches that hold all layers in one format, so they take no skip_layers
RECALL = "recall"
RULER_TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt")
TASKS = (RECALL, *RULER_TASKS)


def title(cache: str) -> str:
    """A cache's title in tables and pictures: that of its name, or the name itself."""
    return CACHES.get(cache, cache)
