"""The loader frees the memory of the text that it has read."""

import json
import os
import random
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq

from gptddp.prepare.build import prepare
from gptddp.prepare.recipe import Settings

GROUPS, DOCUMENT_BYTES = 500, 8000

# In a separate process: free memory of earlier tests could hide a leak.
CHILD = """
import json, resource, sys
import pyarrow as pa
from gptddp.data.dataset import open_dataset
from gptddp.data.loader import Loader

dataset, at, read = open_dataset(sys.argv[1]), [], 0
text_bytes = sum(group.text_bytes for group in dataset.row_groups("train"))
loader = Loader(dataset, lanes=8, batch=8, seq_len=1024, seed=1)
for part in (0.2, 1.0):
    while read < part * text_bytes:
        loader.next()
        read += 8 * 1024  # tokens of one byte each
    pages = int(open("/proc/self/statm").read().split()[1])
    at.append((pages * resource.getpagesize(), pa.total_allocated_bytes()))
loader.close()
print(json.dumps([text_bytes, *at]))
"""


def test_memory_is_flat_over_hundreds_of_row_groups(tmp_path, monkeypatch):
    """From the 100th to the 500th row group 32 MB of text are read, and under a third is kept."""
    monkeypatch.setattr("gptddp.prepare.shard_writer._ROW_GROUPS", GROUPS)
    rng = random.Random(1)
    words = [os.urandom(4).hex() for _ in range(2000)]
    texts = [" ".join(rng.choices(words, k=DOCUMENT_BYTES // 9)) for _ in range(10 * GROUPS)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "source.parquet")
    settings = Settings(tokenizer="bytes")
    dataset = prepare([tmp_path / "source.parquet"], tmp_path / "data", settings)
    assert len(dataset.row_groups("train")) >= GROUPS
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(dataset.dir)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    text_bytes, (resident, arrow), (resident_later, arrow_later) = json.loads(child.stdout)
    assert text_bytes > 37e6
    assert arrow < 5e6 and arrow_later < 5e6
    assert resident_later - resident < 10e6
