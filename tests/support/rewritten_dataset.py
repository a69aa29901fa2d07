"""Datasets that differ from those that `gptddp prepare` writes."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_64_hexdigest

from gptddp.data.dataset import Dataset, open_dataset


def rewrite(dataset: Dataset, out: Path, rows: int, compression: str = "zstd") -> Dataset:
    """The same documents in the same files, but in row groups of `rows`, with this compression."""
    shutil.copytree(dataset.dir, out)
    manifest = json.loads((out / "dataset.json").read_text())
    for split in manifest["splits"].values():
        for file in split["files"]:
            path = out / file["path"]
            texts = pq.read_table(path)["text"].to_pylist()
            pq.write_table(
                pa.table({"text": texts}),
                path,
                row_group_size=rows,
                compression=compression,
                use_dictionary=False,
                write_page_checksum=True,
            )
            groups = [texts[i : i + rows] for i in range(0, len(texts), rows)]
            sizes = [sum(len(text.encode()) for text in group) for group in groups]
            file["row_groups"] = [
                [len(group), size, size + len(group)]
                for group, size in zip(groups, sizes, strict=True)
            ]
            file |= {"bytes": path.stat().st_size, "xxh3_64": xxh3_64_hexdigest(path.read_bytes())}
    (out / "dataset.json").write_text(json.dumps(manifest))
    return open_dataset(out)
