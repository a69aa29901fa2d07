"""What is used of torch beyond its API: in one place, in a list that is checked at the start."""

import ast
from pathlib import Path

import pytest
import torch

import gptddp
from gptddp.distributed import torch_private
from gptddp.errors import ConfigError

HIDDEN = [
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous._delay",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler"
    "._stop_heartbeats",
    "torch.distributed.launcher.api.LocalElasticAgent",
]
PRIVATE = Path(torch_private.__file__).parent
KINDS = ("foreign", "own", "methods")
HALVES = [PRIVATE / "torch_private.py", PRIVATE / "torch_private_elastic.py"]


def private_names(path, kind):
    """The private attributes in a module, or the private methods of its classes."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            found.setdefault("own" if of_self else "foreign", set()).add(node.attr)
        if isinstance(node, ast.ClassDef):
            methods = {it.name for it in node.body if isinstance(it, ast.FunctionDef)}
            found.setdefault("methods", set()).update(methods)
    return {it for it in found.get(kind, ()) if it.startswith("_") and not it.startswith("__")}


def test_private_names_of_others_are_used_in_one_place():
    """No other module takes one, but for `os._exit` and `sys._current_frames`, which are public."""
    for path in Path(gptddp.__file__).parent.rglob("*.py"):
        if path not in HALVES:
            assert private_names(path, "foreign") <= {"_exit", "_current_frames"}, path


def test_the_list_of_names_is_what_is_used():
    """Every name of torch that the two modules take or override is checked, and no other."""
    used = {it for path in HALVES for kind in KINDS for it in private_names(path, kind)}
    used = {it for it in used if not it.startswith("_forkserver")}  # multiprocessing's
    listed = {name.split(".")[-1] for names in torch_private.NAMES.values() for name in names}
    listed |= {name.split(".")[0] for names in torch_private.NAMES.values() for name in names}
    assert used == {it for it in listed if it.startswith("_")}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_name_that_torch_lacks_is_told_at_the_start(monkeypatch, name):
    """The message has the name, this torch and the one to install; the unchanged torch passes."""
    torch_private.check_torch()
    monkeypatch.delattr(name)
    with pytest.raises(
        ConfigError, match=rf"torch {torch.__version__[:4]}.* has no {name},.*2\.13"
    ):
        torch_private.check_torch()


def test_what_only_an_instance_has_is_looked_for_too(monkeypatch):
    """A member that no __init__ sets is missing, and so is a whole module."""
    for module, name in [
        (next(iter(torch_private.NAMES)), "_RendezvousState._gone"),
        ("torch.gone", "x"),
    ]:
        monkeypatch.setattr(torch_private, "NAMES", {module: [name]})
        with pytest.raises(ConfigError, match=f"has no {module}.{name}"):
            torch_private.check_torch()
