"""The direction of imports, and that importing the package has no side effects."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fp8attn
import fp8attn_tools

SOURCE = Path(fp8attn.__file__).parent
TOOLS = Path(fp8attn_tools.__file__).parent

# A module of `fp8attn` may import the modules in its row.
ALLOWED = {
    "errors": set(),
    "files": set(),
    "checks": {"derivatives", "errors"},
    "contents": {"formats", "layout", "pages", "params"},
    "extras": {"errors"},
    "formats": {"checks", "errors"},
    "numerics": {"formats"},
    "params": {"errors", "formats"},
    "layout": set(),
    "pages": {"checks", "formats"},
    "scales": {"errors", "files", "formats", "layout", "numerics", "pages"},
    "overflow": {"formats", "layout", "pages", "scales"},
    "reference": {"formats", "layout", "numerics", "pages", "params"},
    "backends": {"errors", "formats", "kernels", "layout", "pages", "params", "reference"},
    "_torch_ops": {"backends", "contents", "formats", "layout", "pages", "params"},
    "derivatives": set(),
    "ops": {"_torch_ops", "backends", "checks", "contents", "derivatives", "formats", "layout", "pages", "params"},
    "dense": {"_torch_ops", "ops", "backends", "checks", "derivatives", "formats", "layout", "pages", "params", "precompile"},
    "mode": {"_torch_ops", "dense", "errors", "formats", "layout", "pages", "params"},
    "cache": {"checks", "dense", "errors", "files", "formats", "layout", "ops", "overflow", "pages", "params", "precompile", "scales"},
    "kernels": {"formats", "layout", "numerics", "pages", "params"},
    "straight_through": {"formats", "layout", "ops", "pages", "params", "reference"},
    "precompile": {"backends", "errors", "formats", "kernels", "layout", "pages", "params"},
    "integrations": {"cache", "checks", "dense", "errors", "extras", "formats", "layout", "mode", "pages"}
    | {"formats", "numerics", "ops", "overflow", "params", "precompile", "scales"},
}

# A module of `fp8attn_tools` may import the modules of `fp8attn_tools` in its row, and anything of `fp8attn`.
ALLOWED_TOOLS = {
    "plan": set(),
    "shape": {"plan"},
    "calibration": set(),
    "checkpoints": set(),
    "diagnostics": set(),
    "evaluation": set(),
    "cli": {"calibration", "checkpoints", "diagnostics", "evaluation", "plan", "shape"},
}


def imports(path: Path, source: Path = SOURCE) -> set[str]:
    """First components of what a file imports from its package in `source`, also inside functions."""
    here = path.relative_to(source).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level]) if node.level else []
            full = base + (node.module or "").split(".") if node.level else (node.module or "").split(".")
            if node.level or full[0] == source.name:
                full = [part for part in full if part not in ("", source.name)]
                found |= {full[0]} if full else {alias.name for alias in node.names}
    return found


def packages(path: Path) -> set[str]:
    """The packages from which a file imports by name, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def test_imports_point_one_way():
    for path in SOURCE.rglob("*.py"):
        part = path.relative_to(SOURCE).with_suffix("").parts[0]
        if part in ALLOWED:
            extra = imports(path) - ALLOWED[part] - {part}
            assert not extra, f"{path.relative_to(SOURCE)} imports {sorted(extra)}; see docs/architecture.md"


def test_imports_of_the_tools_point_one_way():
    for path in TOOLS.rglob("*.py"):
        part = path.relative_to(TOOLS).with_suffix("").parts[0]
        if part != "__init__":
            extra = imports(path, TOOLS) - ALLOWED_TOOLS[part] - {part}
            assert not extra, f"{path.relative_to(TOOLS)} imports {sorted(extra)}; see docs/architecture.md"


def test_the_library_does_not_import_the_tools():
    for path in SOURCE.rglob("*.py"):
        assert "fp8attn_tools" not in packages(path), path


def test_the_core_does_not_import_integrations():
    """`__init__` hands their public names on."""
    for path in SOURCE.rglob("*.py"):
        part = path.relative_to(SOURCE).with_suffix("").parts[0]
        if "integrations" in imports(path):
            assert part in ("integrations", "__init__"), path


BLOCKED = """
import importlib, importlib.abc, pkgutil, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
import fp8attn
names = [m.name for m in pkgutil.walk_packages(fp8attn.__path__, "fp8attn.") if not m.name.startswith("fp8attn.integrations.")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_the_library_works_without_the_tools_and_what_they_need():
    """Every module of the core can be imported; what needs an optional library is in `integrations`."""
    blocked = ("fp8attn_tools", "typer", "rich", "matplotlib", "transformers", "huggingface_hub", "diffusers", "vllm")
    ended = subprocess.run([sys.executable, "-c", BLOCKED.format(blocked=blocked)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 80


def test_importing_the_package_imports_no_optional_library():
    names = ("triton", "transformers", "diffusers", "vllm", "typer", "matplotlib", "fp8attn_tools")
    code = f"import sys, fp8attn; print([m for m in {names} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("package", [fp8attn, fp8attn_tools])
def test_public_functions_shadow_no_module(package):
    modules = {path.name.removesuffix(".py") for path in Path(package.__file__).parent.iterdir()}
    assert not modules & set(package.__all__)


def test_lazy_names_are_functions_and_other_names_are_errors():
    for name in fp8attn_tools.__all__:
        assert getattr(fp8attn_tools, name).__name__ == name
    for package in (fp8attn, fp8attn_tools):
        with pytest.raises(AttributeError, match="has no attribute 'calibrates'"):
            package.calibrates  # noqa: B018


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
    for path in (*SOURCE.rglob("*.py"), *TOOLS.rglob("*.py")):
        for function in functions(path):
            file = str(path.relative_to(SOURCE.parent))
            if len(parameters(function)) > MAX_PARAMETERS and f"fp8attn/{FLAT.get(function.name)}" != file:
                over[f"{file}: {function.name}"] = len(parameters(function))
    assert not over, f"more than {MAX_PARAMETERS} parameters: {over}; pass an aggregate (kernels), a dataclass or a NamedTuple"


def test_what_kernels_of_many_arguments_are_compiled_for_is_in_objects():
    """Their entry functions have no list of constexpr parameters beside the run-time arguments."""
    for name, file in FLAT.items():
        if file.startswith("kernels/"):
            [entry] = [function for function in functions(SOURCE / file) if function.name == name]
            constants = {x.arg for x in parameters(entry) if x.annotation is not None and "constexpr" in ast.unparse(x.annotation)}
            assert "OPTIONS" in constants and constants <= {"OPTIONS", "QUERIES"}, file
