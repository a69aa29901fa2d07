"""What a command loads before it does anything: most of the time of a short one.

The numbers are of modules beyond those of `python -c pass`. Each costs about a third of a
millisecond; a number that has to be raised is a start that is slower.
"""

import json
import subprocess
import sys

import pytest

PROBE = """
import sys
bare = set(sys.modules)
from gptddp.k8s.cli.main import cli
try:
    cli(sys.argv[1:])
finally:
    print("\\n".join(set(sys.modules) - bare), file=sys.stderr)
"""
HEAVY = {"kubernetes", "requests", "urllib3", "ssl", "http.client", "asyncio", "email"}
RENDERED = {"argparse", "logging", "tomllib", "difflib"}


@pytest.fixture
def files(tmp_path):
    """What the commands are given: a kubeconfig of a server that is away."""
    config = {
        "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c"}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("args", "most", "forbidden"),
    [
        (["--help"], 90, HEAVY | RENDERED | {"yaml", "json", "gptddp.config"}),
        (["render", "--replicas", "4", "--", "--steps", "9"], 145, HEAVY | RENDERED),
        (["list", "--kubeconfig", "{files}/config"], 175, HEAVY),
    ],
    ids=lambda it: it[0] if isinstance(it, list) else None,
)
def test_a_command_loads_no_more_than_it_needs(files, args, most, forbidden):
    """The number of modules is bounded, and none of those is among them that others need."""
    command = [sys.executable, "-c", PROBE, *(arg.format(files=files) for arg in args)]
    said = subprocess.run(command, capture_output=True, text=True).stderr.splitlines()
    loaded = {line for line in said if line and " " not in line}
    assert loaded & forbidden == set()
    assert len(loaded) <= most, len(loaded)
    assert "click" in loaded
