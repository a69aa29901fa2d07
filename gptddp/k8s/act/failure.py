"""Adds to the error of a failed request, as a second line, what was done before it."""

import contextlib
from collections.abc import Iterator

from gptddp.errors import GptddpError
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.observe.watcher import transient

REFUSED = (403, 422)  # 403: by a right, a quota or a webhook; 422: by a policy of the cluster
AGAIN = "repeat the command to continue from there"


@contextlib.contextmanager
def says(
    refused: str, unknown: str = "", errors: type[GptddpError] = ClusterError
) -> Iterator[None]:
    """Add `refused` to an error raised inside; it says what was done and what was not.

    Adds `unknown` instead if the server may have acted, and only its answer is missing.
    """
    try:
        yield
    except errors as error:
        unanswered = isinstance(error, ClusterError) and transient(error)
        error.args = (f"{error}\n  {unknown if unknown and unanswered else refused}",)
        raise
