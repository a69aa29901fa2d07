"""`python -m gptddp.launch`: the container's entrypoint, see launcher.py."""

from gptddp.distributed.process import exit_now
from gptddp.launch.launcher import main

exit_now(main())  # a worker that cannot be reaped must not hold up a pod that is done
