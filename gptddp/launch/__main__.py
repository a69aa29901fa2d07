"""`python -m gptddp.launch`: the container's entrypoint, see launcher.py."""

import sys

from gptddp.launch import overlay

# Does not return where the job has own code. -P: the working directory, where Python would look
# first, is no place of it.
overlay.main(sys.argv[1:], [sys.executable, "-P", "-m", "gptddp.launch"])

from gptddp.distributed.process import exit_now  # noqa: E402  # of that code, if there is any
from gptddp.launch.launcher import main  # noqa: E402

exit_now(main())  # a worker that cannot be reaped must not hold up a pod that is done
