"""How the files of a dataset have changed: since it was prepared, or since a run started."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptddp.files import is_inside, may_pass

_SHOWN = 10  # differences in a message


def files(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The manifest's entry of every shard, by path."""
    return {f["path"]: f for split in manifest["splits"].values() for f in split["files"]}


def misplaced(manifest: Mapping[str, Any]) -> str | None:
    """The first field of a manifest that names a file outside the dataset's folder; None: none."""
    for split, content in manifest["splits"].items():
        for i, file in enumerate(content["files"]):
            if not is_inside(file["path"]):
                return f"splits.{split}.files[{i}].path is {file['path']!r}"
    name = manifest["tokenizer"]["file"]
    return None if not name or is_inside(name) else f"tokenizer.file is {name!r}"


def damaged(dir: Path, manifest: Mapping[str, Any]) -> dict[str, str]:
    """The files that are missing or have another size, each with a description: {path: text}.

    Raises OSError for an error of the volume that may pass.
    """
    expected = {path: file["bytes"] for path, file in files(manifest).items()}
    if name := manifest["tokenizer"]["file"]:
        expected[name] = manifest["tokenizer"]["bytes"]
    found = {}
    for path, bytes in expected.items():
        try:
            size = (dir / path).stat().st_size
        except OSError as error:
            if may_pass(error):
                raise
            found[path] = f"{path}: {error.strerror}"
        else:
            if size != bytes:
                found[path] = f"{path} has {size} bytes instead of {bytes}"
    return found


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The differences between the files of two manifests, {path: entry}; one line per file."""
    lines = []
    for path in sorted(old.keys() | new.keys(), key=os.fsencode):
        before, after = old.get(path), new.get(path)
        if before is None or after is None:
            lines.append(f"{path} was {'added' if before is None else 'removed'}")
        elif before["bytes"] != after["bytes"]:
            lines.append(f"{path} has {after['bytes']} bytes instead of {before['bytes']}")
        elif before != after:
            lines.append(f"{path} has other content")
    return lines


def listed(lines: list[str]) -> str:
    """The first lines of many, and the number of the others."""
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more
