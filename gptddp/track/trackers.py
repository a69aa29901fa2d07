"""The trackers. Opening one for a run gives the last step that it has, and a function to send more.

The last step comes from the tracker or its files: a note of ours would be wrong after a kill
between sending and noting. Any error means that the tracker is unavailable. Closing sends the rest.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gptddp.errors import ConfigError

Row = tuple[int, float, dict[str, float]]  # step, unix seconds, values by name
Opened = tuple[int, Callable[[Sequence[Row]], None]]
_PROJECT = "gptddp"  # unless the tracker's own variable names another
_ROOM = 2**20  # bytes; with less free space W&B may have lost what it wrote, without an error


@contextmanager
def _wandb(folder: Path, id: str, name: str, config: dict[str, Any]) -> Iterator[Opened]:
    """Online, the server has the next step. Offline, files may be torn: those of earlier processes
    are removed, and this process writes the whole run again.
    """
    ours = {"WANDB_DIR": str(folder), "WANDB_PROJECT": _PROJECT, "WANDB_SILENT": "true"}
    for variable in ours.keys() - os.environ.keys():
        os.environ[variable] = ours[variable]
    import wandb

    with suppress(Exception):
        wandb.teardown()  # the rest of a failed session
    quiet = wandb.Settings(console="off", disable_git=True, x_disable_stats=True)
    run = wandb.init(id=id, name=name, config=config, resume="allow", settings=quiet)
    here = Path(run.dir).parent
    for other in here.parent.glob(f"offline-run-*-{id}"):
        if run.offline and other != here:
            shutil.rmtree(other)

    def send(rows: Sequence[Row]) -> None:
        for step, when, values in rows:
            run.log({**values, "_timestamp": when}, step=step, commit=True)

    yield max(0, run.step - 1), send  # offline: 0
    run.finish()
    if run.offline and shutil.disk_usage(here).free < _ROOM:
        raise OSError(errno.ENOSPC, "no room for W&B's files", str(here))


@contextmanager
def _trackio(folder: Path, id: str, name: str, config: dict[str, Any]) -> Iterator[Opened]:
    """Each step has an id, which a server or the local database accepts only once."""
    from trackio.remote_client import RemoteClient
    from trackio.sqlite_storage import SQLiteStorage

    env, server = os.environ, None
    run = {"project": env.get("TRACKIO_PROJECT", _PROJECT), "run": name, "run_id": id}
    if place := env.get("TRACKIO_SPACE_ID") or env.get("TRACKIO_SERVER_URL"):
        server = RemoteClient(place, env.get("HF_TOKEN"), env.get("TRACKIO_WRITE_TOKEN"))
        last = server.predict(api_name="get_run_summary", **run)["last_step"]
    else:
        last = SQLiteStorage.get_last_step(**run)

    def send(rows: Sequence[Row]) -> None:
        logs = [{"step": step, "metrics": it, "log_id": f"{id}-{step}"} for step, _, it in rows]
        if server:
            logs = [{**run, **it, "config": config} for it in logs]
            server.predict(api_name="bulk_log", logs=logs, hf_token=env.get("HF_TOKEN"))
        else:
            steps, values, ids = ([it[key] for it in logs] for key in logs[0])
            of_steps = {"metrics_list": values, "steps": steps, "log_ids": ids}
            SQLiteStorage.bulk_log(**run, **of_steps, config=config)

    yield last or 0, send


@contextmanager
def _tensorboard(folder: Path, id: str, name: str, config: dict[str, Any]) -> Iterator[Opened]:
    """Event files, one per process; a step is one record, and a torn one is not read."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    here = folder / "tensorboard" / name
    # all files: their names begin with the time of day, and clocks differ
    files = map(EventFileLoader, map(str, here.glob("events.*")))
    last = max((event.step for file in files for event in file.Load()), default=0)
    writer = EventFileWriter(str(here))
    lines = "\n".join(f"    {field} = {value}" for field, value in config.items())
    writer.add_event(Event(summary=text_pb("config", lines), step=last))

    def send(rows: Sequence[Row]) -> None:
        for step, when, values in rows:
            event = Event(step=step, wall_time=when)
            for it, value in values.items():
                event.summary.value.add(tag=it, simple_value=value)
            writer.add_event(event)
        writer.flush()

    yield last, send
    writer.close()


TRACKERS = {"wandb": _wandb, "trackio": _trackio, "tensorboard": _tensorboard}


def check_installed(name: str) -> None:
    """Raise ConfigError if the package of a tracker is not installed; loads nothing."""
    # a folder of that name, such as wandb's output folder, is a package without an origin
    if name in TRACKERS and getattr(find_spec(name), "origin", None) is None:
        fix = f"pip install 'gptddp[{name}]', or for pods `make image EXTRAS={name}`"
        raise ConfigError(f"track is {name}, but the package {name} is not installed: {fix}")
