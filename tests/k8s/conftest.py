"""A small API server that can be written to, and the command line against it."""

import pytest
from support.writable_api_server import WriteAPI, put_claims


@pytest.fixture
def api(tmp_path):
    """With the claims that a job has by default."""
    server = WriteAPI(tmp_path)
    put_claims(server)
    yield server
    server.close()


@pytest.fixture
def k8s(api):
    """Run `gptddp-k8s` against the server."""
    return api.command_line
