"""The private functions of torch that the package uses, apart from kernels/: all of them are listed here, and the
installed torch has them.

Run this against a nightly torch to see what a new version breaks.
"""

import re
from pathlib import Path

import fp8attn

SOURCE = Path(fp8attn.__file__).parent
# By name: (file, why no public function does).
PRIVATE = {
    "torch.nn.Module._forward_pre_hooks": (
        "mode/sites.py",
        "hooks need the same key each time, or Dynamo compiles again",
    ),
    "torch.nn.Module._forward_hooks": ("mode/sites.py", "as above"),
    "torch.nn.Module._forward_hooks_always_called": ("mode/sites.py", "as above"),
    "_dynamo_marked_constant": ("mode/mode.py", "torch.compiler.assume_constant_result imports all of Dynamo"),
    "torch.Tensor._make_wrapper_subclass": ("", "a tensor without storage"),
    "torch._C._disabled_torch_function_impl": ("", "a subclass without __torch_function__"),
    "torch.utils._pytree": ("", "torch.utils.pytree is newer than torch 2.11"),
    "torch._C._are_functorch_transforms_active": ("", "torch.func is not traced through the kernels"),
    "torch.utils._python_dispatch": ("", "whether a call is being traced into torch ops"),
    "torch._dynamo.mark_static_address": ("", "public, but documented nowhere"),
    "torch._assert_async": ("", "an assertion without a wait for the device"),
    "_scaled_dot_product_attention_quantized": (
        "../fp8attn_tools/diagnostics/accumulation.py",
        "PyTorch's experimental op is measured",
    ),
}
# Attributes with a leading underscore of torch's modules, and the names above without a module.
USES = re.compile(r"torch(?:\.\w+)*\._(?!_)\w+(?:\.\w+)*|module\._forward\w*hooks\w*|\b_dynamo_marked_constant\b")


def uses(path):
    """The private names of torch in a file's code, without comments."""
    text = "\n".join(line.partition("#")[0] for line in path.read_text().splitlines())
    return {name for name in USES.findall(text) if "_torch_ops" not in name}


def test_every_use_of_a_private_function_is_listed():
    last = {name.rpartition(".")[2] for name in PRIVATE}
    for path in SOURCE.rglob("*.py"):
        if "kernels" in path.parts:
            continue
        for name in uses(path):
            assert any(part in last for part in name.split(".")), (
                f"{path.relative_to(SOURCE)} uses {name}, which is not listed here"
            )


def test_every_listed_function_is_used_where_it_says():
    for name, (file, _) in PRIVATE.items():
        paths = [SOURCE / file] if file else SOURCE.rglob("*.py")
        assert any(name.rpartition(".")[2] in path.read_text() for path in paths), name


def test_the_installed_torch_has_them():
    import torch._dynamo
    import torch.nn.attention.experimental._scaled_dot_product_attention_quantized
    import torch.overrides
    import torch.utils._python_dispatch
    import torch.utils._pytree

    module = torch.nn.Linear(1, 1)
    for name in PRIVATE:
        if name.startswith("torch.nn.Module."):
            assert isinstance(getattr(module, name.rpartition(".")[2]), dict), name
        elif name.startswith("torch."):
            found = torch
            for part in name.split(".")[1:]:
                found = getattr(found, part)
    assert torch.compiler.assume_constant_result(lambda: None)._dynamo_marked_constant is True
