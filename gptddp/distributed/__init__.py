"""The ranks and the process of each (environment, group, hardware, peers), for all that trains."""
