"""The ranks and the process of each: environment, group, hardware. For all that trains."""
