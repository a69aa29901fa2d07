"""Trackers for the tests: W&B offline, a trackio server on this machine, TensorBoard's files."""

import subprocess
import sys

import pytest
from support.processes import free_port
from support.waiting import until

SERVER = """
import sys, trackio
trackio.show(open_browser=False, host="127.0.0.1", server_port=int(sys.argv[1]), block_thread=True)
"""


@pytest.fixture
def server(spawn, tmp_path, monkeypatch):
    """server(): start a trackio server. `TRACKIO_SERVER_URL` is set before it is ready."""
    port, folder = free_port(), tmp_path / "trackio"
    for name, value in {
        "TRACKIO_DIR": str(folder),
        "TRACKIO_SERVER_URL": f"http://127.0.0.1:{port}",
        "TRACKIO_WRITE_TOKEN": "token-of-the-tests",
    }.items():
        monkeypatch.setenv(name, value)

    def begin():
        began = spawn([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.DEVNULL)
        import httpx

        def answers():
            try:
                return httpx.get(f"http://127.0.0.1:{port}/version", timeout=1).is_success
            except httpx.HTTPError:
                return False

        until(answers, "the trackio server")
        return began

    return begin


@pytest.fixture(params=["tensorboard", "wandb", "trackio"])
def tracker(request, server, monkeypatch):
    """The name of an available tracker."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    if request.param == "trackio":
        server()
    return request.param
