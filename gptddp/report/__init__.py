"""Draw runs on one HTML page: `gptddp report`."""
