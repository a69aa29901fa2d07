"""A run on one page, for people who would rather look than read: `gptddp report`."""
