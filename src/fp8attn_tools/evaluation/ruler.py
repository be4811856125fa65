"""RULER's retrieval tasks (Hsieh et al. 2024, arXiv:2404.06654), made by lm-eval's generators. These need no network
for the tasks here.

`niah_single_1` hides one sentence in a text that repeats itself. In `niah_multikey_2` the whole text is such sentences,
each about another key ("One of the special magic numbers for shy-harbour is: 2718281."), and the question is about one
of them. `niah_multikey_3` is the same with UUIDs as keys and values. `ruler_vt` asks for all variables to which a chain
of assignments gives one value. Prompts, and the score (the share of answers that the continuation contains), are those
of lm-eval's tasks of the same names.

Samples are independent: each has its own text, as in RULER. Questions about a shared text would cost less, but the
intervals and tests of `paired` assume independent samples.
"""

from __future__ import annotations

import contextlib
import io
import random
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from fp8attn.errors import UsageError
from fp8attn.extras import hint

from .names import RULER_TASKS
from .outcomes import Sample

# Arguments of lm-eval's `generate_samples`: (haystack, keys, values).
_NIAH = {
    "niah_single_1": ("repeat", "words", "numbers"),
    "niah_multikey_2": ("needle", "words", "numbers"),
    "niah_multikey_3": ("needle", "uuids", "uuids"),
}
_CHAINS = "ruler_vt"


def ruler_samples(
    tokenizer: Any, task: str, *, lengths: Sequence[int], samples: int = 500, seed: int = 0
) -> Iterator[Sample]:
    """`samples` questions of each length.

    Args:
        tokenizer: the model's; lm-eval measures its prompts with it.
        task: one of `names.RULER_TASKS`.
        lengths: tokens of prompt and answer together. Prompts are up to one step of the generator shorter.
        seed: of everything. The first n samples do not depend on the number of samples.
    Raises:
        UsageError: no such task; the task does not fit into a length; lm-eval is not installed.
    """
    if task not in RULER_TASKS:
        raise UsageError(f"no RULER task is called {task!r}; choose from {', '.join(RULER_TASKS)}")
    for length in lengths:
        for doc in _docs(tokenizer, task, length, samples, seed):
            prompt = f"{doc['input'].rstrip()} {doc['gen_prefix']}"
            # A chain begins after the example at the start of the prompt, whose variables have other names.
            depth = prompt.index(doc["outputs"][0]) / len(prompt)
            tokens = array("i", tokenizer(prompt, verbose=False)["input_ids"])
            max_new_tokens = 30 if task == _CHAINS else 128
            yield Sample(task, length, doc["index"], tokens, tuple(doc["outputs"]), depth, max_new_tokens)


def _docs(tokenizer: Any, task: str, length: int, samples: int, seed: int) -> list[dict]:
    """lm-eval's documents. Its generators print, and use the global random number generators, whose state
    is restored.
    """
    import numpy as np

    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                from lm_eval.tasks.ruler import niah_utils, prepare_niah, vt_utils
            except ModuleNotFoundError as error:
                raise UsageError(f"{task} needs lm-eval, and {error.name} is not installed; {hint('ruler')}") from error

            random.seed(f"{task} {length} {seed}")
            np.random.seed(random.getrandbits(32))
            if task == _CHAINS:
                _check_that_chains_fit(tokenizer, length)
                example = vt_utils.sys_vartrack_w_noise_random(
                    tokenizer, num_samples=1, max_seq_length=500, incremental=5
                )[0]
                return vt_utils.sys_vartrack_w_noise_random(
                    tokenizer, num_samples=samples, max_seq_length=length, icl_example=example
                )
            haystack, keys, values = _NIAH[task]
            return prepare_niah.generate_samples(
                prepare_niah.get_haystack(type_haystack=haystack),
                TOKENIZER=tokenizer,
                max_seq_length=length,
                template=niah_utils.TEMPLATE,
                type_haystack=haystack,
                type_needle_k=keys,
                type_needle_v=values,
                num_samples=samples,
            )
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def _check_that_chains_fit(tokenizer: Any, length: int) -> None:
    """Refuse a length into which not even the shortest prompt fits: lm-eval's generator would not end."""
    from lm_eval.tasks.ruler import vt_utils

    example, question = (
        vt_utils.generate_input_output(noises, 1, 4, is_icl=short)[0] for noises, short in ((5, True), (10, False))
    )
    example, question = (
        len(tokenizer(text)["input_ids"]) + 60 for text in (example, question)
    )  # 30 for the answer, and a margin
    if example > 500:
        raise UsageError(
            f"{_CHAINS} takes an example of at most 500 tokens; the shortest has {example} with this tokenizer: leave "
            f"this task out"
        )
    if example + question > length:
        raise UsageError(
            f"{_CHAINS} does not fit into {length} tokens; its shortest prompt takes about {example + question}: give "
            f"a larger length"
        )
