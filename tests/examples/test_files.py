"""What lies in examples/ is what its pages, its image and its manifest say."""

import re

import yaml
from support.example_runs import EXAMPLES
from support.manifests import container
from support.paths import ROOT

from gptddp import __version__


def test_the_job_runs_the_script_that_the_image_has():
    """Of this version, in the folder to which the Dockerfile copies it."""
    own = container(yaml.safe_load((EXAMPLES / "job.yaml").read_text()))
    assert own["image"] == f"gptddp:{__version__}"
    assert own["env"] == [{"name": "OMP_NUM_THREADS", "value": own["resources"]["limits"]["cpu"]}]
    copied = re.search(r"^COPY examples (\S+)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert own["args"][0] == f"{copied[1]}/digits.py"
    assert "!examples" in (ROOT / ".dockerignore").read_text().split()
