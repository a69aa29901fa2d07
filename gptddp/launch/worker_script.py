"""The script that torchrun runs in each worker process: the trainer, and its exit."""

from gptddp.distributed.process import run
from gptddp.distributed.report import report
from gptddp.run import crash_loop


def main() -> int:
    """Train; return the exit code. A failed import of the trainer counts as the trainer's error.

    It is reported here, because torchrun does not show an exception of its script.
    """
    try:
        from gptddp import train
    except Exception as error:
        if final := crash_loop.early(error):
            report(final)
            return final.exit_code
        raise
    return train.main()


if __name__ == "__main__":
    run(main)
