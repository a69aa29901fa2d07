"""How the files of a dataset have changed: since it was prepared, or since a run began."""

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
    """The first field of a manifest that names a file outside of the dataset's folder."""
    for split, content in manifest["splits"].items():
        for i, file in enumerate(content["files"]):
            if not is_inside(file["path"]):
                return f"splits.{split}.files[{i}].path is {file['path']!r}"
    name = manifest["tokenizer"]["file"]
    return None if not name or is_inside(name) else f"tokenizer.file is {name!r}"


def damaged(dir: Path, manifest: Mapping[str, Any]) -> dict[str, str]:
    """The files that are not there or not of their size, each with what is wrong: {path: text}.

    Raises OSError for trouble of the volume that may pass.
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


def added(dir: Path, manifest: Mapping[str, Any]) -> dict[str, int]:
    """Shards beside those of the manifest, which nothing would read: {path: bytes}.

    Hidden files are left alone: network file systems make some. Raises OSError as `damaged` does.
    """
    known, found = files(manifest), {}
    for split in manifest["splits"]:
        try:
            with os.scandir(dir / split) as entries:
                for entry in entries:
                    path = f"{split}/{entry.name}"
                    visible = entry.name.endswith(".parquet") and not entry.name.startswith(".")
                    if visible and path not in known:
                        found[path] = entry.stat().st_size
        except OSError as error:  # the folder's files are damaged, which says more
            if may_pass(error):
                raise
    return found


def on_disk(dir: Path, manifest: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(damaged files, lines that name every difference between folder and manifest)."""
    bad, extra = damaged(dir, manifest), added(dir, manifest)
    known = files(manifest)
    lines = []
    for path, text in bad.items():
        twin = next((p for p in extra if extra[p] == known.get(path, {}).get("bytes")), None)
        if twin and "bytes instead of" not in text:
            text += f" (renamed to {twin}?)"
            del extra[twin]
        lines.append(text)
    lines += [f"{path} was added" for path in extra]
    return list(bad), lines


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between the files of two manifests, each as {path: entry}; a line a file."""
    lines = []
    gone = {path: old[path] for path in old.keys() - new.keys()}
    fresh = {path: new[path] for path in new.keys() - old.keys()}
    for path in sorted(gone, key=os.fsencode):
        same = [p for p in fresh if _content(fresh[p]) == _content(old[path])]
        if twin := min(same, key=os.fsencode, default=None):
            lines.append(f"{path} was renamed to {twin}")
            del fresh[twin]
        else:
            lines.append(f"{path} was removed")
    lines += [f"{path} was added" for path in sorted(fresh, key=os.fsencode)]
    for path in sorted(old.keys() & new.keys(), key=os.fsencode):
        before, after = old[path], new[path]
        if before["bytes"] != after["bytes"]:
            lines.append(f"{path} has {after['bytes']} bytes instead of {before['bytes']}")
        elif before != after:
            lines.append(f"{path} has other content")
    return lines


def _content(file: Mapping[str, Any]) -> tuple[Any, Any]:
    return file["bytes"], file.get("xxh3_64")


def listed(lines: list[str]) -> str:
    """The first lines of many, and how many more there are."""
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more
