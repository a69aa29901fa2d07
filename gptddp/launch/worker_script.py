"""The script that torchrun runs in each worker process: the trainer, with its way out."""

from gptddp.distributed.process import run
from gptddp.distributed.report import report
from gptddp.run import crash_loop


def main() -> int:
    """Train; the exit code. A trainer that cannot be imported, as own code, counts as its error.

    Nobody else would tell: torchrun keeps an exception of its script for itself.
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
