"""Does the FP8 cache change what a model says? The same tokens through a BF16 cache and an FP8 cache."""
