"""Every error of the package, with the exit code that it ends a process with. Stdlib only."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path


def visible(text: object) -> str:
    """The text in one line, with every control character as an escape such as `\\x1b`.

    For what is read from a shared volume, a peer or a cluster: none of it may move the cursor of a
    terminal, colour it, or look like another line.
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
    shared = False  # raised on every rank alike, so that one of them is enough to say it


class ConfigError(GptddpError):
    """A flag, a TOML key, or a run directory that belongs to another configuration."""


class DataError(GptddpError):
    """A source, a dataset or a tokenizer that cannot be used."""


class NonFiniteError(GptddpError):
    """The loss or the gradient stayed non-finite beyond `max_skipped` steps in a row."""

    exit_code = 3


class CheckpointError(GptddpError):
    """Checkpoints exist, and none of them is valid; or there were some, and none is left."""

    exit_code = 4


class AuditError(GptddpError):
    """It cannot be told here whether a run is what its log says."""


class CrashLoopError(GptddpError):
    """The same step has failed in three lives by the trainer's own error."""

    exit_code = 5


class Finished(GptddpError):
    """The run is complete, and this start has no step to do: nothing is written."""

    exit_code = 0


class Stopped(GptddpError):
    """A signal stopped the run; its state is saved and the run can be continued."""

    exit_code = 143


class Superseded(GptddpError):
    """A later life of the run, or another job, has it now: torchrun may start this one again."""

    exit_code = 1


class BadRowGroup(DataError):
    """A row group that cannot be read, however often it is tried, and that a lane needs now.

    group: where it stands in the loader's list of row groups.
    """

    def __init__(self, message: str, group: int) -> None:
        super().__init__(message)
        self.group = group


# -- what ends a life, and not the run -----------------------------------------------------------


class LifeLost(RuntimeError):
    """This process ends by no error of its own: it is started again, and the run goes on."""

    exit_code = 1


class LostPeer(LifeLost):
    """A collective has failed because another rank is gone or silent."""


class Broken(LostPeer):
    """The world has changed while it was formed: the next view is another."""


class BadMessage(LifeLost):
    """Another rank has sent a value of another kind than is due: it is not used."""

    def __init__(self, sender: str, what: str) -> None:
        super().__init__(
            f"{sender} has sent {what}: the ranks must run the same version of gptddp, and nobody "
            "else may reach their ports"
        )


class Hung(LifeLost):
    """This rank has not come further for too long, and nobody waits for it in a collective."""


class Diverged(LifeLost):
    """The ranks do not hold the same state: no rank's state can be used."""

    def __init__(self, digests: Mapping[int, int], step: int, names: Sequence[str]) -> None:
        """`digests`: of each rank's state; `names`: every rank as a message says it, by rank."""
        value, count = Counter(digests.values()).most_common(1)[0]
        majority = 2 * count > len(digests)
        self.ranks = [rank for rank, digest in digests.items() if not majority or digest != value]
        self.names = [names[rank] for rank in self.ranks]
        which = f"{', '.join(self.names)} differ{'s' if len(self.ranks) == 1 else ''} from the rest"
        if not majority:
            which = f"there is no majority to tell which of {' and '.join(self.names)} is wrong"
        super().__init__(
            f"after step {step} the ranks do not hold the same parameters and optimizer state: "
            f"{which}. Going back to the newest checkpoint; a pod that is named again and again is "
            "on broken hardware, or on another kind of processor than the rest"
        )


# -- caught inside the package ------------------------------------------------------------------


class Unusable(Exception):
    """Why a checkpoint cannot be loaded.

    `damaged`: for good, so that it may be set aside; `transient`: it may be readable soon.
    """

    def __init__(
        self, path: Path, reason: str, *, damaged: bool = True, transient: bool = False
    ) -> None:
        super().__init__(f"{path.name}: {reason}")
        self.reason = reason
        self.damaged = damaged
        self.transient = transient
