"""The direction of imports, and that importing the package has no side effects."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8attn
import fp8attn_tools

SOURCE = Path(fp8attn.__file__).parent
TOOLS = Path(fp8attn_tools.__file__).parent

# The floors of `fp8attn`, the ground first: a module imports modules of lower floors, and of its own package
# (docs/architecture.md).
FLOORS = (
    {"derivatives", "errors"},
    {"checks", "extras", "files"},
    {"formats"},
    {"numerics", "pages", "params", "scales"},
    {"contents", "kernels", "latent", "reference"},
    {"backends"},
    {"_torch_ops", "precompile"},
    {"ops"},
    {"cache", "dense", "straight_through"},
    {"mode"},
    {"integrations"},
    {"__init__"},
)
# Those of `fp8attn_tools`, which imports anything of `fp8attn`.
TOOL_FLOORS = ({"plan"}, {"shape"}, {"calibration", "checkpoints", "diagnostics", "evaluation"}, {"cli"}, {"__init__"})


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


@pytest.mark.parametrize(("source", "floors"), [(SOURCE, FLOORS), (TOOLS, TOOL_FLOORS)], ids=["library", "tools"])
def test_imports_point_down(source, floors):
    floor = {part: number for number, parts in enumerate(floors) for part in parts}
    for path in source.rglob("*.py"):
        part = path.relative_to(source).with_suffix("").parts[0]
        assert part in floor, f"{part} is on no floor"
        level = [name for name in imports(path, source) - {part} if floor.get(name, 0) >= floor[part]]
        assert not level, (
            f"{path.relative_to(source)} imports {sorted(level)}, which are not below it; see docs/architecture.md"
        )


def test_no_files_import_each_other():
    """Also not in a larger circle, inside functions, or for types only."""
    files = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (*SOURCE.rglob("*.py"), *TOOLS.rglob("*.py"))
    }
    below = {name: set(modules(path, name, files)) - {name} for name, path in files.items()}
    while ground := [name for name, others in below.items() if not others & below.keys()]:
        for name in ground:
            del below[name]
    assert not below, f"circles among {sorted(below)}"


def modules(path: Path, name: str, files: dict[str, Path]) -> Iterator[str]:
    """The modules of `files` that a file imports by name, `name` being its own."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield from (
                    x
                    for x in (f"{full}.{alias.name}", full)
                    if x in files and (x != full or f"{full}.{alias.name}" not in files)
                )


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
names = [m.name for m in pkgutil.walk_packages(fp8attn.__path__, "fp8attn.")]
names = [name for name in names if not name.startswith("fp8attn.integrations.")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_the_library_works_without_the_tools_and_what_they_need():
    """Every module of the core can be imported; what needs an optional library is in `integrations`."""
    blocked = (
        "fp8attn_tools",
        "typer",
        "rich",
        "matplotlib",
        "transformers",
        "huggingface_hub",
        "diffusers",
        "vllm",
    )
    ended = subprocess.run([sys.executable, "-c", BLOCKED.format(blocked=blocked)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 80


def test_importing_the_package_imports_no_optional_library():
    names = ("triton", "transformers", "diffusers", "vllm", "typer", "matplotlib", "fp8attn_tools")
    code = f"import sys, fp8attn; print([m for m in {names} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


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


def is_entry(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is the entry of a kernel, whose caller needs a flat list of arguments. Triton takes tuples as
    arguments, but specializes on every number in a tuple, even if `do_not_specialize` names the tuple: new lengths
    would compile new kernels. And Triton 3.6 launches no kernel that has a tensor descriptor in a tuple.
    (docs/lab/2026-11-launching.md)
    """
    return function.name.endswith("_kernel") and any(
        ".jit" in ast.unparse(decorator) for decorator in function.decorator_list
    )


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    args = function.args
    return [x for x in (*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg) if x is not None]


def test_functions_have_few_parameters():
    over = {}
    for path in (*SOURCE.rglob("*.py"), *TOOLS.rglob("*.py")):
        for function in functions(path):
            if len(parameters(function)) > MAX_PARAMETERS and not is_entry(function):
                over[f"{path.relative_to(SOURCE.parent)}: {function.name}"] = len(parameters(function))
    assert not over, (
        f"more than {MAX_PARAMETERS} parameters: {over}; pass an aggregate (kernels), a dataclass or a NamedTuple"
    )


def test_what_kernels_of_many_arguments_are_compiled_for_is_in_objects():
    """Their entry functions have no list of constexpr parameters beside the run-time arguments."""
    for path in (SOURCE / "kernels").rglob("*.py"):
        for function in functions(path):
            if is_entry(function) and len(parameters(function)) > MAX_PARAMETERS:
                constants = {
                    x.arg
                    for x in parameters(function)
                    if x.annotation is not None and "constexpr" in ast.unparse(x.annotation)
                }
                assert constants <= {"OPTIONS", "QUERIES"}, f"{path.name}: {function.name}"
