"""A small API server that can be written to, and the command line against it."""

import os

import pytest
from support.rank_0_lines import of_a_life
from support.writable_api_server import WriteAPI, put_claims

from gptddp.k8s.cluster import connect


@pytest.fixture(autouse=True, scope="session")
def no_authorities():
    """A client reads the machine's certificates for longer than all that a command asks for; the
    servers of the tests have none of those."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", os.devnull)
        yield


@pytest.fixture(scope="session")
def said():
    """The lines of rank 0 up to a step that does not move, by the code that writes them."""
    return of_a_life()


def with_claims(folder):
    """A server with the claims that a job has by default."""
    server = WriteAPI(folder)
    put_claims(server)
    return server


@pytest.fixture
def server_in():
    """server_in(folder): the server of `api`. A file with tests of another kind has its own."""
    return with_claims


@pytest.fixture
def api(server_in, tmp_path):
    """A server of this test alone."""
    server = server_in(tmp_path)
    yield server
    server.close()


@pytest.fixture
def k8s(api):
    """Run `gptddp-k8s` against the server."""
    return api.command_line


@pytest.fixture
def cluster(api):
    """A client of `api`."""
    return connect(None, api.kubeconfig)
