"""`run_answers` for an engine whose connector is LMCache's:
`python -m tests.vllm.run_lmcache WAY [ENGINE_OPTIONS_AS_JSON]`.

vLLM's platform for CPUs looks at the attributes of all objects in all modules (`_rebind_kernels`, in vLLM 0.32). One of
llvmlite, which LMCache imports and vLLM does not, has no dictionary of attributes, and vLLM does not start. Here it
finds an empty one.
"""

import os
import sys

from tests.vllm.run_answers import ENVIRONMENT, main

os.environ |= ENVIRONMENT  # the number of threads, before torch reads it

from vllm.triton_utils import dispatcher


def attributes_of(value):
    found = vars(value)
    return found if hasattr(type(found), "get") else {}


dispatcher.vars = attributes_of

if __name__ == "__main__":
    main(*sys.argv[1:])
