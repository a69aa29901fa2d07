"""image/make-venv: what it installs on which machine, printed before it begins."""

import os
import subprocess
from importlib.metadata import requires

import pytest
from support.paths import ROOT

# Stand-ins that install nothing: python makes an empty environment, uv prints its arguments.
PYTHON = """#!/bin/sh
[ "$2" != venv ] || { mkdir -p "$3/bin" && ln -sf /bin/true "$3/bin/python"; }
"""
UV = '#!/bin/sh\necho "uv $*, torch from ${UV_TORCH_BACKEND:-PyPI}"\n'
HAS_GPU = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))


@pytest.fixture
def make_venv(tmp_path):
    """make_venv(**variables): the lines that it prints with these environment variables."""
    for name, text in (("python3", PYTHON), ("uv", UV)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(**variables):
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = [ROOT / "image/make-venv", tmp_path / "python3", tmp_path / ".venv", "train"]
        made = subprocess.run(
            command, env=path | variables, capture_output=True, text=True, check=True
        )
        return made.stdout.splitlines()

    return run


def test_packages_size_and_time_are_printed_first(make_venv):
    """One line comes before the first package. Packages only for GPUs are omitted without a GPU."""
    told, asked = make_venv()
    assert "installing PyTorch and gptddp[train]" in told and "GB to download" in told
    assert "It takes about a minute and the download." in told
    assert ("no-gpu.txt" in asked) != HAS_GPU and "torch from PyPI" in asked


def test_torch_cpu_installs_the_build_without_cuda(make_venv):
    """TORCH=cpu, as for the image, takes the build of a third of the size from PyTorch's index."""
    told, asked = make_venv(TORCH="cpu")
    assert "without CUDA" in told
    assert "torch from cpu" in asked and "no-gpu.txt" not in asked


@pytest.mark.parametrize(("build", "hints"), [("cpu", 1), ("cuda", 0)])
def test_an_index_out_of_reach_is_named(make_venv, tmp_path, build, hints):
    """If an installation with TORCH=cpu fails, the message names the index that it needs."""
    (tmp_path / "uv").write_text("#!/bin/sh\nexit 2\n")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        make_venv(TORCH=build)
    assert failed.value.returncode == 2
    assert failed.value.stderr.count("PyTorch's own index") == hints


def test_an_unknown_build_of_pytorch_is_refused_before_anything_is_made(make_venv, tmp_path):
    """A typo in TORCH is refused, as it would otherwise download CUDA's libraries."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        make_venv(TORCH="CPU")
    assert "TORCH is 'CPU': it must be cuda or cpu" in refused.value.stderr
    assert not (tmp_path / ".venv").exists()


def test_omitted_packages_are_requirements_of_torch():
    """torch requires every package of no-gpu.txt; any other name would silently have no effect."""
    lines = (ROOT / "image/no-gpu.txt").read_text().splitlines()
    names = [it.split(";")[0] for it in lines if not it.startswith("#")]
    asked = requires("torch") or []
    if not any(it.startswith("cuda-toolkit") for it in asked):
        pytest.skip("PyTorch's build without CUDA")
    asked += requires("cuda-toolkit") or []
    assert [it for it in names if not any(one.startswith(it) for one in asked)] == []
