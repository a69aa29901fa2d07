"""`python -m gptddp.launch`: the container's entrypoint, see launcher.py."""

from gptddp.distributed.process import leave
from gptddp.launch.launcher import main

leave(main())  # a worker that cannot be reaped must not hold up a pod that is done
