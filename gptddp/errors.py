"""Every error that a user can meet, with the exit code that it ends a process with.

GptddpError               2   any mistake in what the user gave
├── ConfigError           2   a flag, a TOML key, or a run directory of another configuration
├── DataError             2   a source, a dataset or a tokenizer
├── NonFiniteError        3   too many steps in a row without a finite loss and gradient
├── CheckpointError       4   checkpoints exist and none of them is valid
├── CrashLoopError        5   the same step failed in three lives by the trainer's own error
├── Stopped             143   a signal asked for the stop; the run can be continued
└── Superseded            1   a later life of the run, or another job, goes on with it
"""


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
    """Checkpoints exist, and none of them is valid."""

    exit_code = 4


class CrashLoopError(GptddpError):
    """The same step has failed in three lives by the trainer's own error."""

    exit_code = 5


class Stopped(GptddpError):
    """A signal stopped the run; its state is saved and the run can be continued."""

    exit_code = 143


class Superseded(GptddpError):
    """Another process has the run now: not final, torchrun may start this one again."""

    exit_code = 1
