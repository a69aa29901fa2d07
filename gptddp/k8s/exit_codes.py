"""Exit codes and errors of `gptddp-k8s`; exit codes of the containers that it reports on."""

import re
import signal

from gptddp.errors import ConfigError, GptddpError

# Exit codes of commands. A refusal has the exit code of its error: see also gptddp.errors.


class ClusterError(GptddpError):
    """The API server cannot be reached, or refuses. status: of HTTP; 0: no answer."""

    exit_code = 1

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NotFoundError(GptddpError):
    """There is no PyTorchJob of that name."""

    exit_code = 102


class JobFailed(GptddpError):
    """The program of a batch Job ended with an error, or cannot run."""

    exit_code = 100


class TimedOut(GptddpError):
    """The Job has not ended within the time limit."""

    exit_code = 124


SUCCEEDED = 0
FAILED = JobFailed.exit_code  # the job, or a Job's program
GONE = NotFoundError.exit_code  # there is no such job, or not any more
SUSPENDED = 103
TIMED_OUT = TimedOut.exit_code
INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + signal.SIGPIPE  # the reader of its output is gone

# Exit codes of containers. The operator replaces a pod whose code is 128 or more.
BAD_INPUT = ConfigError.exit_code
NOT_EXECUTABLE = 126
NOT_STARTED = 128
FIRST_RETRYABLE = 128
MEANINGS = {
    1: "an error",
    BAD_INPUT: "bad configuration or data",
    3: "loss or gradient not finite",
    4: "no valid checkpoint",
    5: "the same step failed again and again",
    NOT_EXECUTABLE: "the command cannot be run",
    127: "the command does not exist",
    NOT_STARTED: "the container could not be started",
    137: "SIGKILL from outside, as when its node shuts down",
    143: "stopped by SIGTERM",
    200: "an error that the launcher did not expect",
}
_LAUNCHER = "gptddp.launch: "
_RANK = re.compile(r"gptddp\.launch: (rank \d+: .*)")
_OTHERS = re.compile(r"gptddp\.|\[rank|Traceback|[IWEF]\d{4} |step \d|life \d")  # other writers
_PASSING = (
    "gptddp.launch: the worker is lost",
    "gptddp.launch: stopped by",
    "gptddp.launch: step ",
)


def meaning(code: int) -> str:
    """`2 (bad configuration or data)`, `139 (SIGSEGV)`, `17`."""
    text = MEANINGS.get(code)
    return f"{code} ({text})" if text else described(code)


def described(code: int) -> str:
    """`137 (SIGKILL)`, `2`."""
    if code > 128:
        try:
            return f"{code} ({signal.Signals(code - 128).name})"
        except ValueError:
            pass
    return str(code)


def reason(message: str, limit: int = 500) -> str:
    """The reason in a container's termination message, which is the end of its log.

    A rank's final error as the launcher reports it, else the launcher's own last message, else the
    last line. Lines after a launcher's line belong to it, up to a line of another writer.
    """
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    if not lines:
        return ""
    ranks = [i for i, line in enumerate(lines) if _RANK.match(line)]
    own = [
        i
        for i, line in enumerate(lines)
        if line.startswith(_LAUNCHER) and not line.startswith(_PASSING)
    ]
    at = (ranks or own or [len(lines) - 1])[-1]
    said = [lines[at].removeprefix(_LAUNCHER)]
    for line in lines[at + 1 :] if ranks or own else []:
        if _OTHERS.match(line):
            break
        said.append(line)
    text = " ".join(" ".join(said).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
