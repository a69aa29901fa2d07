"""What lies in examples/ is what its pages, its image and its manifest say."""

import re

import yaml
from support.example_runs import EXAMPLES
from support.manifests import container
from support.paths import ROOT

from gptddp import __version__


def test_a_script_is_short_enough_to_be_read():
    """Fewer than 200 lines each, and each in the table of the folder's page."""
    page = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        if path.suffix == ".py":
            assert len(path.read_text().splitlines()) < 200, path.name
        name = path.name + "/" * path.is_dir()
        assert name in ("README.md", "__pycache__/") or f"| `{name}` |" in page


def test_the_job_runs_the_script_that_the_image_has():
    """Of this version, in the folder to which the Dockerfile copies it."""
    own = container(yaml.safe_load((EXAMPLES / "job.yaml").read_text()))
    assert own["image"] == f"gptddp:{__version__}"
    assert own["env"] == [{"name": "OMP_NUM_THREADS", "value": own["resources"]["limits"]["cpu"]}]
    copied = re.search(r"^COPY examples (\S+)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert own["args"][0] == f"{copied[1]}/digits.py"
    assert "!examples" in (ROOT / ".dockerignore").read_text().split()


def test_the_tables_for_those_who_come_from_elsewhere_name_what_there_is():
    """Each function or class is in the file that a row names; each path exists."""
    _, *tables = (ROOT / "docs/learn-ddp.md").read_text().split("\n## From ")
    assert len(tables) == 2
    text = "".join(tables)
    named = re.findall(r"((?:`\w+`(?:,| and) )*`\w+`) in `(\S+)`", text)
    assert len(named) > 8
    for names, path in named:
        for name in re.findall(r"\w{4,}", names):
            assert re.search(rf"^ *(def|class) {name}\b", (ROOT / path).read_text(), re.M), name
    for path in re.findall(r"`(examples/[^`]+)`", text):
        assert (ROOT / path).exists(), path
