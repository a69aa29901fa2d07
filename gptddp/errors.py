"""Every error of the package, with its exit code. Standard library only."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path


def visible(text: object) -> str:
    """Return the text as one line, with control characters escaped, as in `\\x1b`.

    Use it for text from a shared volume, a peer or a cluster: such text must not move the cursor,
    colour the terminal, or look like another line.
    """
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
    return "".join(escaped)


def visible_lines(text: object) -> str:
    """`visible` of a text that may have several lines, and tabs."""
    kept = str(text).split("\n")
    return "\n".join("\t".join(map(visible, line.split("\t"))) for line in kept)


class GptddpError(Exception):
    """Base of the errors whose message is meant for the user: the field, the rule and the fix."""

    exit_code = 2
    shared = False  # True: every rank raises it, and one of them reports it


class ConfigError(GptddpError):
    """A flag, a TOML key, or a run directory that belongs to another configuration."""


class DataError(GptddpError):
    """A source, a dataset or a tokenizer that cannot be used."""


class NonFiniteError(GptddpError):
    """The loss or the gradient stayed non-finite beyond `max_skipped` steps in a row."""

    exit_code = 3


class CheckpointError(GptddpError):
    """No checkpoint is valid, or all checkpoints that existed are lost."""

    exit_code = 4


class AuditError(GptddpError):
    """This machine cannot check whether a run matches its log."""


class CrashLoopError(GptddpError):
    """The same step has failed three times with an error of the trainer."""

    exit_code = 5


class Finished(GptddpError):
    """The run is complete: this start has no step to do and writes nothing."""

    exit_code = 0


class Stopped(GptddpError):
    """A signal stopped the run; its state is saved and the run can be continued."""

    exit_code = 143


class Superseded(GptddpError):
    """A later life of the run, or another job, has taken it; torchrun may restart this one."""

    exit_code = 1


class BadRowGroup(DataError):
    """A row group that a lane needs now cannot be read, also after retries.

    group: its index in the loader's list of row groups.
    """

    def __init__(self, message: str, group: int) -> None:
        super().__init__(message)
        self.group = group


# -- errors that end a life, but not the run -------------------------------------------------------


class LifeLost(RuntimeError):
    """This process must restart, through no error of its own; the run continues."""

    exit_code = 1


class LostPeer(LifeLost):
    """A collective has failed because another rank is gone or silent."""


class Broken(LostPeer):
    """The world is over: another view follows."""


class BadMessage(LifeLost):
    """Another rank sent a value of an unexpected kind; the value is not used."""

    def __init__(self, sender: str, what: str) -> None:
        super().__init__(
            f"{sender} has sent {what}: all ranks must run the same version of gptddp, and no "
            "other process may reach their ports"
        )


class Hung(LifeLost):
    """This rank made no progress for too long, and no peer waits for it in a collective."""


class Diverged(LifeLost):
    """The ranks do not hold the same state: no rank's state can be used."""

    def __init__(self, digests: Mapping[int, int], step: int, names: Sequence[str]) -> None:
        """`digests`: the hash of each rank's state; `names`: the name of each rank, in order."""
        value, count = Counter(digests.values()).most_common(1)[0]
        majority = 2 * count > len(digests)
        self.ranks = [rank for rank, digest in digests.items() if not majority or digest != value]
        self.names = [names[rank] for rank in self.ranks]
        which = f"{', '.join(self.names)} differ{'s' if len(self.ranks) == 1 else ''} from the rest"
        if not majority:
            which = f"there is no majority to show which of {' and '.join(self.names)} is wrong"
        super().__init__(
            f"after step {step} the ranks do not hold the same parameters and optimizer state: "
            f"{which}. Going back to the newest checkpoint. If a pod is named again and again, its "
            "hardware is broken, or its processor is of another kind than the others"
        )


# -- caught inside the package ------------------------------------------------------------------


class Unusable(Exception):
    """Why a checkpoint cannot be loaded.

    `damaged`: it will never load, so it may be set aside; `transient`: it may be readable soon.
    """

    def __init__(
        self, path: Path, reason: str, *, damaged: bool = True, transient: bool = False
    ) -> None:
        super().__init__(f"{path.name}: {reason}")
        self.reason = reason
        self.damaged = damaged
        self.transient = transient
