"""Opening parquet files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq


@contextmanager
def open_parquet(
    path: str | os.PathLike[str], footer: pq.FileMetaData | None = None
) -> Iterator[pq.ParquetFile]:
    """A parquet file, whatever its name: pyarrow would take one that is not UTF-8 for a mistake.

    Checksums, where the writer left any, are compared: an uncompressed page shows no damage. There
    is no pre_buffer, because it would keep every chunk read so far in memory.
    """
    with (
        pa.OSFile(os.fsencode(path)) as raw,
        pq.ParquetFile(
            raw, metadata=footer, pre_buffer=False, page_checksum_verification=True
        ) as file,
    ):
        yield file
