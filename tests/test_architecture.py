"""The direction of imports, and that importing the package has no side effects."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8attn

SOURCE = Path(fp8attn.__file__).parent

# A module may import the modules in its row.
ALLOWED = {
    "errors": set(),
    "files": set(),
    "checks": {"derivatives", "errors"},
    "contents": {"formats", "layout", "pages", "params"},
    "extras": {"errors"},
    "formats": {"checks", "errors"},
    "numerics": {"formats"},
    "params": {"errors"},
    "layout": set(),
    "pages": {"checks", "formats", "layout", "params"},
    "scales": {"errors", "files", "formats", "layout", "numerics", "pages"},
    "overflow": {"formats", "layout", "pages", "scales"},
    "calibration": {"errors", "files", "formats", "layout", "numerics", "pages", "scales"},
    "reference": {"formats", "layout", "numerics", "pages", "params"},
    "backends": {"errors", "formats", "kernels", "layout", "pages", "params", "reference"},
    "_torch_ops": {"backends", "contents", "formats", "layout", "pages", "params"},
    "derivatives": set(),
    "ops": {"_torch_ops", "backends", "checks", "contents", "derivatives", "formats", "layout", "pages", "params"},
    "dense": {"_torch_ops", "backends", "checks", "derivatives", "formats", "layout", "pages", "params", "precompile"},
    "mode": {"_torch_ops", "dense", "errors", "formats", "layout", "pages", "params"},
    "cache": {"checks", "dense", "errors", "files", "formats", "layout", "ops", "overflow", "pages", "params", "precompile", "scales"},
    "kernels": {"formats", "layout", "numerics", "pages", "params"},
    "straight_through": {"formats", "layout", "ops", "pages", "params", "reference"},
    "plan": {"errors", "formats", "layout", "pages"},
    "precompile": {"backends", "errors", "formats", "kernels", "layout", "pages", "params"},
    "integrations": {"cache", "calibration", "checks", "dense", "errors", "extras", "formats", "layout", "mode", "pages"}
    | {"formats", "numerics", "ops", "overflow", "params", "plan", "precompile", "scales"},
    "diagnostics": {"backends", "dense", "extras", "formats", "integrations", "kernels", "layout", "numerics", "pages", "scales"},
}

# What a module may import inside a function, when the module itself is long imported: code above it.
LAZY = {"precompile": {"integrations"}}  # `warmup` of a transformers config


def nodes(tree: ast.AST, lazy: bool) -> Iterator[ast.AST]:
    """All nodes below a node. Without `lazy`, only those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from nodes(node, lazy)


def imports(path: Path, lazy: bool = True) -> set[str]:
    """First components of what a file imports from fp8attn; with `lazy` inside functions as well."""
    here = path.relative_to(SOURCE).with_suffix("").parts
    found = set()
    for node in nodes(ast.parse(path.read_text()), lazy):
        if isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level]) if node.level else []
            full = base + (node.module or "").split(".") if node.level else (node.module or "").split(".")
            if node.level or full[0] == "fp8attn":
                full = [part for part in full if part not in ("", "fp8attn")]
                found |= {full[0]} if full else {alias.name for alias in node.names}
    return found


def test_imports_point_one_way():
    for path in SOURCE.rglob("*.py"):
        part = path.relative_to(SOURCE).with_suffix("").parts[0]
        if part in ALLOWED:
            extra = (imports(path) - LAZY.get(part, set()) | imports(path, lazy=False)) - ALLOWED[part] - {part}
            assert not extra, f"{path.relative_to(SOURCE)} imports {sorted(extra)}; see docs/architecture.md"


def test_the_core_does_not_import_integrations():
    """`fp8attn.calibrate` and `warmup(config)` need transformers, and import it when they are called."""
    for path in SOURCE.rglob("*.py"):
        part = path.relative_to(SOURCE).with_suffix("").parts[0]
        if "integrations" in imports(path):
            assert part in ("integrations", "evaluation", "cli", "diagnostics", "precompile", "__init__"), path


def test_importing_the_package_imports_no_optional_library():
    code = "import sys, fp8attn; print([m for m in ('triton', 'transformers', 'diffusers', 'vllm', 'typer') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_public_functions_shadow_no_module():
    modules = {path.name.removesuffix(".py") for path in SOURCE.iterdir()}
    assert not modules & set(fp8attn.__all__)


def test_calibrate_is_a_function_and_shadows_no_module():
    assert fp8attn.calibrate.__module__ == "fp8attn.integrations.transformers.calibrate"
    assert callable(fp8attn.calibrate) and "calibrate" in fp8attn.__all__
    with pytest.raises(AttributeError, match="has no attribute 'calibrates'"):
        fp8attn.calibrates  # noqa: B018


MAX_PARAMETERS = 20
# Functions whose caller needs a flat list of arguments:
# - The entry functions of kernels. Triton takes tuples as arguments, but specializes on every number in a tuple, even if
#   `do_not_specialize` names the tuple: new lengths would compile new kernels. And Triton 3.6 launches no kernel that has a tensor
#   descriptor in a tuple. (docs/lab/2026-11-launching.md)
# - The implementation of a torch op, whose arguments are those of its schema.
FLAT = {
    "portable_kernel": "kernels/portable/kernel.py", "page_kernel": "kernels/append/page.py", "step_kernel": "kernels/append/step.py",
    "decode_kernel": "kernels/decode/kernel.py", "prefill_kernel": "kernels/prefill/kernel.py", "_attention": "ops.py",
}  # fmt: skip


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    args = function.args
    return [x for x in (*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg) if x is not None]


def test_functions_have_few_parameters():
    over = {}
    for path in SOURCE.rglob("*.py"):
        for function in functions(path):
            if len(parameters(function)) > MAX_PARAMETERS and FLAT.get(function.name) != str(path.relative_to(SOURCE)):
                over[f"{path.relative_to(SOURCE)}: {function.name}"] = len(parameters(function))
    assert not over, f"more than {MAX_PARAMETERS} parameters: {over}; pass an aggregate (kernels), a dataclass or a NamedTuple"


def test_what_kernels_of_many_arguments_are_compiled_for_is_in_objects():
    """Their entry functions have no list of constexpr parameters beside the run-time arguments."""
    for name, file in FLAT.items():
        if file.startswith("kernels/"):
            [entry] = [function for function in functions(SOURCE / file) if function.name == name]
            constants = {x.arg for x in parameters(entry) if x.annotation is not None and "constexpr" in ast.unparse(x.annotation)}
            assert "OPTIONS" in constants and constants <= {"OPTIONS", "QUERIES"}, file
