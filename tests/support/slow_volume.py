"""The trainer on a volume from which a checkpoint is read for longer than a silent peer is waited.

`reading` in the run directory has the process id of the rank that reads. The file `hang` there has
one read stop in the middle for ever.
"""

import os
import sys
import time
from pathlib import Path

from gptddp import train
from gptddp.checkpoint import store
from gptddp.distributed import connect, storage
from gptddp.distributed.process import run
from gptddp.flags import from_args

connect.TIMEOUT_S = 2.0
connect.FIRST_TIMEOUT_S, connect.STORE_S = 4.0, 1.0
storage.FIRST_LINE_S, storage.NEXT_LINE_S = 3.0, 3.0
PARTS, PART_S = 50, 0.25
RUN = Path(from_args(sys.argv[1:]).run_dir)
real = store.read_shards


def slowly(path, manifest, buffers=None, tell=lambda _: None):
    """Read a checkpoint in more than twelve seconds, and say so."""
    (RUN / "reading.new").write_text(str(os.getpid()))
    (RUN / "reading.new").rename(RUN / "reading")
    for part in range(PARTS):
        tell(f"reading {path.name}, {part} of {PARTS}")
        time.sleep(PART_S)
        if part == PARTS // 2 and (RUN / "hang").exists():
            (RUN / "hang").unlink()
            time.sleep(600)
    real(path, manifest, buffers, tell)


store.read_shards = slowly

if __name__ == "__main__":
    run(train.main)
