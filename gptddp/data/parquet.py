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
    """Open a parquet file, also one whose name is not UTF-8, which pyarrow alone would refuse.

    Page checksums are compared where the writer left any: nothing else shows damage of an
    uncompressed page. There is no pre_buffer, because it would keep all that was read so far in
    memory. Raises OSError or pyarrow.ArrowException.
    """
    with (
        pa.OSFile(os.fsencode(path)) as raw,
        pq.ParquetFile(
            raw, metadata=footer, pre_buffer=False, page_checksum_verification=True
        ) as file,
    ):
        yield file
