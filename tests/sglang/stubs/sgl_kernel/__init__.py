"""Stands for sgl_kernel, SGLang's kernels, whose wheels need CUDA. Models on a CPU run without them; a kernel that is
called raises.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args, **options):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return kernel
