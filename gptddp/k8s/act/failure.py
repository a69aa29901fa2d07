"""What a failed request leaves behind, as a second line of its error."""

import contextlib
from collections.abc import Iterator

from gptddp.errors import GptddpError
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.observe.watcher import transient

REFUSED = (403, 422)  # of a right, a quota or a webhook; of a policy of the cluster
AGAIN = "the same command again goes on from there"


@contextlib.contextmanager
def says(
    refused: str, unknown: str = "", errors: type[GptddpError] = ClusterError
) -> Iterator[None]:
    """Let an error within also say what was done and what was not.

    `unknown` is said instead where the server may have done it, and only its answer is missing.
    """
    try:
        yield
    except errors as error:
        unanswered = isinstance(error, ClusterError) and transient(error)
        error.args = (f"{error}\n  {unknown if unknown and unanswered else refused}",)
        raise
