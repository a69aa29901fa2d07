"""One life of a run around the loop (begin, agree, record, stop, end), for `train`."""
