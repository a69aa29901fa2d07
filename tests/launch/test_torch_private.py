"""The private names of torch: used in one place, in a list that is checked at the start."""

import ast
import pkgutil
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as td
from support.forked import fork
from support.paths import ROOT

import gptddp
from gptddp.distributed import torch_private
from gptddp.distributed.lost import is_lost_peer
from gptddp.distributed.torch_private import NAMES, VERIFIED
from gptddp.errors import ConfigError

PRIVATE = Path(torch_private.__file__)
KINDS = ("foreign", "own", "methods")


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
    """No other module uses one, except `os._exit` and `sys._current_frames`, which are public."""
    for path in Path(gptddp.__file__).parent.rglob("*.py"):
        if path != PRIVATE:
            assert private_names(path, "foreign") <= {"_exit", "_current_frames"}, path


def test_the_list_has_exactly_the_used_names():
    """The check covers every private name that the module uses or overrides, and no other."""
    used = {it for kind in KINDS for it in private_names(PRIVATE, kind)}
    used -= {"_server", "_forkserver_authkey"}  # an own name; a name that may be missing
    assert used == {it for name in NAMES for it in name.split(".") if it.startswith("_")}


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_name_is_reported_at_the_start(monkeypatch, name):
    """The message has the name, the installed version, the checked versions and the fix."""
    torch_private.check_torch()  # the unchanged torch passes
    owner, _, last = name.rpartition(".")
    monkeypatch.delattr(pkgutil.resolve_name(owner), last)
    with pytest.raises(ConfigError) as caught:
        torch_private.check_torch()
    installed = f"torch {torch.__version__}"
    fix = f"install torch {VERIFIED}"
    if not name.startswith("torch"):
        installed, fix = f"Python {sys.version.split()[0]}", "use one of Python 3.11 to 3.14"
    assert f"{installed} has no {name}, which gptddp needs: {fix}" in str(caught.value)


def test_a_trainer_without_the_launcher_checks_the_names(tmp_path):
    """Exit code 2 and one line, so that torchrun does not retry for ever."""
    code = (
        "import sys, torch.distributed.distributed_c10d as c10d; del c10d._get_default_store; "
        "from gptddp.train import main; sys.exit(main(sys.argv[1:]))"
    )
    trainer = fork(code, "--data", "x", "--run-dir", "y", stderr=tmp_path / "err")
    assert trainer.wait(60) == 2
    (line,) = (tmp_path / "err").read_text().splitlines()
    assert "has no torch.distributed.distributed_c10d._get_default_store" in line


def test_torch_is_capped_below_the_next_minor_version():
    """The package requires the checked minor version of torch, and the image has it."""
    major, minor = map(int, torch_private.VERIFIED.split("."))
    requirement = f'"torch>={major}.{minor},<{major}.{minor + 1}"'
    assert requirement in (ROOT / "pyproject.toml").read_text()
    assert f"\ntorch=={major}.{minor}." in (ROOT / "image/constraints.txt").read_text()
    assert torch.__version__.startswith(f"{major}.{minor}.")


PEER = """
import sys, time
from datetime import timedelta
import torch.distributed as td
group = td.ProcessGroupGloo(td.FileStore(sys.argv[1], 2), 1, 2, timedelta(seconds=20))
time.sleep(float(sys.argv[2]))
"""


def test_a_lost_peer_is_recognised_by_its_error_text(tmp_path, monkeypatch):
    """Gloo's errors for a silent peer, for a lost peer and after a time-out are recognised."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    errors = []
    for life, lives_s in (("silent", "60"), ("closed", "0")):
        store = str(tmp_path / life)
        peer = fork(PEER, store, lives_s)
        group = td.ProcessGroupGloo(td.FileStore(store, 2), 0, 2, timedelta(seconds=20))
        if life == "closed":
            peer.wait(20)
        for _ in range(2):
            options = td.AllreduceOptions()
            options.timeout = timedelta(seconds=0.2)
            with pytest.raises(RuntimeError) as caught:
                group.allreduce([torch.zeros(4)], options).wait()
            errors.append(caught.value)
        peer.kill()
    assert all(map(is_lost_peer, errors)), errors
    assert not is_lost_peer(RuntimeError("a mistake of ours"))


@pytest.mark.parametrize(
    "text",
    [
        "NCCL operation timed out",
        "NCCL communicator was aborted after a previous error",
        "NCCL Async Error: remote process exited or there was a network error \nNCCL Last Error: ",
        "NCCL AllReduce failed: unhandled system error \nNCCL Last Error: ",
    ],
)
def test_a_lost_peer_is_recognised_in_errors_of_nccl(text):
    """Texts that torch 2.15 raises as a plain RuntimeError, as its source has them."""
    assert is_lost_peer(RuntimeError(text))
