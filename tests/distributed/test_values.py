"""Values between ranks are JSON: parsed and checked; no code of a peer is run."""

import ast
import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch
from support.forked import ranks
from support.paths import ROOT

from gptddp.config import Config
from gptddp.distributed import values
from gptddp.distributed.connect import connect
from gptddp.errors import BadMessage, DataError
from gptddp.run.origin import Origin

# Each of these unpickles received or read data.
PICKLING = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "rpc_sync", "rpc_async", "remote"),
    *("pickle", "marshal"),
}
ORIGIN = Origin(
    config=Config(data="d", run_dir="r", betas=(0.8, 0.9), steps=7, preset="tiny"),
    generation=3,
    step=5,
    source="memory",
    redo=1,
    line={"step": 5, "loss": 1.5},
    run_id="ab" * 16,
    parent=None,
    quarantine={5: [1, 2], 9: [3]},
)


def names_used(path: Path) -> set[str]:
    """Every name, attribute and import of a module."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    found = {node.id for node in nodes if isinstance(node, ast.Name)}
    found |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_no_module_receives_pickled_objects():
    """The package calls no collective of objects, and unpickles nothing."""
    modules = list((ROOT / "gptddp").rglob("*.py"))
    assert len(modules) > 100
    for path in modules:
        assert not names_used(path) & PICKLING, path


THREE = """
import json, sys
from gptddp.distributed.connect import connect
with connect("cpu") as world:
    value = [world.rank, "é" * world.rank, None, {"a": 2**63 + world.rank}, [1.5, float("inf")]]
    found = [world.gather(value), world.broadcast_value(value, 2)]
    print(json.dumps([*found, world.from_rank_0(lambda _: value)]), file=sys.stderr)
    world.leave_together()
"""

TENSORS = """
import json, sys, torch
from gptddp.distributed.connect import connect
with connect("cpu") as world:
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    sizes = [((1 << 19) + 3,), (2, 5), ()]  # the first travels by itself, in each of them
    tensors = [torch.full(size, world.rank, dtype=it) for it in dtypes for size in sizes]
    world.send(tensors, 2, 1)
    sent = [sorted({*it.reshape(-1).tolist()}) for it in tensors]
    world.broadcast(tensors, 0)
    print(json.dumps([world.rank, sent, sum(float(it.sum()) for it in tensors)]), file=sys.stderr)
    world.leave_together()
"""


@pytest.fixture
def three(forked):
    """three(code): stderr and exit code of each of three ranks."""

    def run(code: str) -> list[tuple[int, str]]:
        processes = ranks(3, code=code)
        try:
            return [(it.wait(60), it.stderr.read()) for it in processes]
        finally:
            for it in processes:
                it.kill()

    return run


def test_values_of_every_size_arrive_on_every_rank(three):
    """Values of other lengths on each rank, integers of 64 bits and infinity arrive, too."""
    found = {err.splitlines()[-1] for code, err in three(THREE) if code == 0}
    assert len(found) == 1
    (text,) = found
    gathered, sent, decided = values.decode(text.encode(), "rank 0")
    assert [it[0] for it in gathered] == [0, 1, 2] and gathered[2][1] == "éé"
    assert gathered[1][3] == {"a": 2**63 + 1} and gathered[0][4] == [1.5, float("inf")]
    assert sent == gathered[2] and decided == gathered[0]


def test_tensors_are_sent_to_one_rank_or_to_all(three):
    """Large and small tensors of every dtype arrive; the other ranks keep their values."""
    found = [json.loads(err.splitlines()[-1]) for code, err in three(TENSORS) if code == 0]
    assert sorted(found) == [[it, [[2 * (it > 0)]] * 9, 0.0] for it in range(3)]


def test_garbage_is_reported_with_its_sender():
    """Torn text, a pickle, too deep nesting and an impossible length give one kind of error."""
    for raw in (b"", b"{", b"\xff", pickle.dumps({}), b"[" * 10**6, b"nul"):
        with pytest.raises(BadMessage, match="rank 3 has sent .* not JSON"):
            values.decode(raw, "rank 3")
    for size in (-1, 0, values.MOST_BYTES + 1):
        with pytest.raises(BadMessage, match="rank 3 has sent a value of"):
            values._size(torch.tensor([size]), "rank 3")


def test_a_result_of_rank_0_is_a_value_or_a_known_error():
    """Any other pair is refused: a name from a peer leads only to a class of error."""
    with connect("cpu") as world:
        assert world._opened(["ok", [1]]) == [1]
        with pytest.raises(DataError, match="no text"):
            world._opened(["DataError", "no text"])
        for box in (
            None,
            [],
            ["ok"],
            [1, 2],
            ["Path", "x"],
            ["Unusable", "x"],
            ["BadRowGroup", ""],
        ):
            with pytest.raises(BadMessage, match="rank 0 has sent neither"):
                world._opened(box)


def test_an_origin_arrives_as_it_was_sent():
    """Every field keeps its type: the configuration's tuple, and numbers as keys."""
    raw = values.encode(ORIGIN.to_json())
    assert Origin.from_json(values.decode(raw, "rank 0")) == ORIGIN


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Origin)])
def test_an_origin_with_a_field_of_another_kind_is_refused(field):
    """A missing field is refused, too; no value reaches the training unchecked."""
    sent = ORIGIN.to_json()
    for wrong in (True, [[{}]], [[float("inf"), []]], {"n_layer": "x", "sted": 1}, 1.5):
        if isinstance(wrong, dict) and field == "line":
            continue  # a dictionary of any content
        with pytest.raises(BadMessage, match="rank 0 has sent an origin"):
            Origin.from_json(sent | {field: wrong})
    with pytest.raises(BadMessage, match="an origin without the fields"):
        Origin.from_json({name: value for name, value in sent.items() if name != field})
