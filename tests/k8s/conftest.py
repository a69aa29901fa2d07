"""A small writable API server, and the command line against it."""

import os

import pytest
from support.rank_0_lines import of_a_life
from support.writable_api_server import WriteAPI, put_claims

from gptddp.k8s.cluster import connect


@pytest.fixture(autouse=True, scope="session")
def no_authorities():
    """Skip loading the machine's certificates, which takes longer than a command's requests; the
    test servers do not use them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", os.devnull)
        yield


@pytest.fixture(scope="session")
def logged():
    """The log lines of rank 0 up to a stalled step, written by the real code."""
    return of_a_life()


def with_claims(folder):
    """A server with a job's default claims."""
    server = WriteAPI(folder)
    put_claims(server)
    return server


@pytest.fixture
def server_in():
    """server_in(folder): the server of `api`. Test files that need another server override it."""
    return with_claims


@pytest.fixture
def api(server_in, tmp_path):
    """A server for this test alone."""
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
