"""The script that torchrun runs in each worker process: the trainer, with its way out."""

from gptddp.distributed.process import run

if __name__ == "__main__":
    from gptddp.train import main

    run(main)
