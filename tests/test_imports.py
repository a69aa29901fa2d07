"""What each part of the package may import, and what it loads with that.

Imports run downwards only. A part is a sub-package or a module at the top; it may import its own
modules and the parts of lower levels, also where only type checkers see it.
"""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.paths import ROOT

# From the lowest level up. "gptddp" is the package itself, for its `__version__`.
LEVELS = [
    {"gptddp", "amounts", "errors", "grace", "live", "presets", "units"},
    {"click_types", "config", "files"},
    {"advice", "budget", "flags", "shape"},
    {"grid"},
    {"distributed"},
    {"data", "run"},
    {"checkpoint", "model", "pretrained", "track"},
    {"training"},
    {"train", "inference", "fingerprints", "prepare"},
    {"audit", "report"},
    {"sweep"},
    {"cli", "launch", "demo"},
    {"__main__"},
]
K8S_LEVELS = [
    {"exit_codes", "objects"},
    {"login"},
    {"cluster", "render"},
    {"observe"},
    {"act", "local"},
    {"cli"},
]
# What k8s may import from outside; `gptddp` is again for the version.
K8S_TAKES = {"gptddp", "gptddp.launch.bundle", "gptddp.launch.pod_facts", "gptddp.shape"}
K8S_TAKES |= {
    f"gptddp.{name}"
    for name in ("advice", "budget", "click_types", "config", "errors", "files", "flags")
}
K8S_TAKES |= {"gptddp.grid", "gptddp.live", "gptddp.track.trackers", "gptddp.units"}
# Allowed imports up, or out of k8s, within functions that start a command.
UPWARDS = {
    ("gptddp.k8s", "gptddp.k8s.cli.main"),
    ("gptddp.k8s.cli.short_jobs", "gptddp.prepare.commands"),  # the options of `prepare`
}
OVER_KUBERNETES = ("gptddp.k8s.cluster", "gptddp.k8s.login")
HEAVY = {"torch", "numpy", "pyarrow", "prometheus_client"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted((ROOT / "gptddp").rglob("*.py"))}


class Import(NamedTuple):
    """An import of one of our modules by another."""

    module: str
    target: str
    line: int
    lazy: bool  # within a function


def imports(module: str, node: ast.AST, lazy: bool = False) -> Iterator[Import]:
    """Every import of our own modules below a node."""
    for child in ast.iter_child_nodes(node):
        names: list[str] = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, f"{module}:{child.lineno}: imports are absolute"
            full = [f"{child.module}.{alias.name}" for alias in child.names]
            names = [name if name in MODULES else str(child.module) for name in full]
        for name in dict.fromkeys(names):
            if name.split(".")[0] == "gptddp":
                yield Import(module, name, child.lineno, lazy)
        inside = isinstance(child, ast.FunctionDef | ast.Lambda)
        yield from imports(module, child, lazy or inside)


@functools.cache
def all_imports() -> list[Import]:
    trees = {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}
    return [it for name, tree in trees.items() for it in imports(name, tree)]


def part(module: str) -> str:
    """The part of a module: `data` of `gptddp.data.loader`, `cli` of `gptddp.k8s.cli.main`."""
    names = module.removeprefix("gptddp.k8s.").split(".")
    return names[1] if names[0] == "gptddp" and len(names) > 1 else names[0]


def in_k8s(module: str) -> bool:
    return module.startswith("gptddp.k8s")


def level(module: str) -> int:
    levels = K8S_LEVELS if in_k8s(module) else LEVELS
    found = [n for n, parts in enumerate(levels) if part(module) in parts]
    assert found, f"{module} has no level in tests/test_imports.py"
    return found[0]


def is_allowed(one: Import) -> bool:
    if one.lazy and (one.module, one.target) in UPWARDS:
        return True
    if in_k8s(one.module) != in_k8s(one.target):
        return in_k8s(one.module) and one.target in K8S_TAKES
    return part(one.module) == part(one.target) or level(one.target) < level(one.module)


def test_imports_run_downwards_only():
    """No module imports another part of its level or a higher one; k8s imports only what it may."""
    assert [it for it in all_imports() if not is_allowed(it)] == []


def test_no_modules_import_each_other_in_a_circle():
    """There is no cycle within a sub-package either, in functions, or for type checkers."""
    graph: dict[str, set[str]] = {}
    for one in all_imports():
        if (one.module, one.target) not in UPWARDS:
            graph.setdefault(one.module, set()).add(one.target)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the modules


def test_every_part_has_a_level_and_every_exception_is_used():
    """Every sub-package is in LEVELS, and every pair in UPWARDS is imported."""
    for module in MODULES:
        assert module == "gptddp.k8s" or level(module) >= 0
    assert {(i.module, i.target) for i in all_imports() if i.lazy} >= UPWARDS


def test_the_control_plane_imports_no_package_of_the_trainer():
    """k8s names none of torch, numpy, pyarrow and prometheus_client, not even within a function;
    kubernetes is imported by cluster.py and login.py alone, one module imports by a computed name,
    and one asks whether a package is there."""
    by_name = set()
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text("utf-8"))
        nodes = list(ast.walk(tree))
        names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        names |= {str(n.module) for n in nodes if isinstance(n, ast.ImportFrom)}
        tops = {name.split(".")[0] for name in names}
        if in_k8s(module):
            assert not tops & HEAVY, f"{module} imports {tops & HEAVY}"
        assert "kubernetes" not in tops or module in OVER_KUBERNETES, module
        if tops & {"importlib", "pkgutil", "runpy"} or "__import__" in path.read_text("utf-8"):
            by_name.add(module)
    assert by_name == {"gptddp.distributed.torch_private", "gptddp.track.trackers"}


def loaded(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `code`."""
    code += "\nimport sys; print(*{m.split('.')[0] for m in sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split("\n")[-2].split())


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import gptddp.k8s.cli.main", HEAVY | {"kubernetes", "rich"}),
        ("import gptddp.cli", HEAVY | {"kubernetes", "yaml", "rich"}),
        ("import gptddp.config, gptddp.errors, gptddp.files", HEAVY | {"click", "yaml"}),
        ("import gptddp.train", {"click", "yaml", "kubernetes", "rich"}),
        ("from gptddp import live; live.Screen().phase('x')", {"click", "rich"}),
    ],
)
def test_an_import_loads_no_more_than_it_may(code, forbidden):
    """A fresh interpreter shows none of the forbidden packages after the import."""
    assert not loaded(code) & forbidden


def test_without_its_packages_the_command_says_what_to_install():
    """If click is missing, one line names the package and the extra, without a traceback."""
    code = "import sys; sys.modules['click'] = None; import gptddp.cli"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    wanted = "gptddp needs the package click: pip install 'gptddp[train]'\n"
    assert (run.returncode, run.stderr) == (1, wanted)
