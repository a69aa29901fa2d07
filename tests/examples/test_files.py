"""The job of examples/ fits the script and the image."""

import re

import yaml
from support.example_runs import EXAMPLES
from support.manifests import container
from support.paths import ROOT

from gptddp import __version__


def test_the_job_runs_the_script_in_the_image():
    """The job has the image of this version, and the path of the script in it."""
    own = container(yaml.safe_load((EXAMPLES / "job.yaml").read_text()))
    assert own["image"] == f"gptddp:{__version__}"
    assert own["env"] == [{"name": "OMP_NUM_THREADS", "value": own["resources"]["limits"]["cpu"]}]
    copied = re.search(r"^COPY examples (\S+)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert own["args"][0] == f"{copied[1]}/digits.py"
    assert "!examples" in (ROOT / ".dockerignore").read_text().split()
