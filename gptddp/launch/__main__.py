"""`python -m gptddp.launch`: the container's entrypoint, see launcher.py."""

import sys

from gptddp.launch import overlay

# Does not return if the job has own code. -P: Python must not look for modules in the working
# directory.
overlay.main(sys.argv[1:], [sys.executable, "-P", "-m", "gptddp.launch"])

from gptddp.distributed.process import exit_now  # noqa: E402  # of own code, if the job has any
from gptddp.launch.launcher import main  # noqa: E402

exit_now(main())  # a worker that cannot be reaped must not block the exit
