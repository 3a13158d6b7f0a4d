"""Objects that a start leaves behind, and the cost of collections after it; each test has its own process."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import gc, json
from twostroke.protocol.garbage import THRESHOLDS, collection_seconds, freeze_start_up

class Node:
    def __init__(self):
        self.itself = self

told = {"before": collection_seconds()}
start_up = [Node() for _ in range(1000)]
garbage = [Node() for _ in range(1000)]
del garbage
freeze_start_up()
freeze_start_up()  # of a second worker in the process
told |= {
    "frozen": gc.get_freeze_count(),
    "callbacks": len(gc.callbacks),
    "left": sum(isinstance(one, Node) for one in gc.get_objects()),
    "thresholds": gc.get_threshold() == THRESHOLDS,
}
gc.collect(0)
gc.collect(2)
told["seconds"] = collection_seconds()
del start_up
told["collected"] = gc.collect()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, object]:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, object] = json.loads(ran.stdout)
    return found


def test_what_the_start_made_is_looked_through_no_more(told: dict[str, object]) -> None:
    assert isinstance(told["frozen"], int)
    assert told["frozen"] > 2000  # the nodes and the interpreter's own
    assert told["left"] == 0
    assert told["collected"] == 0  # what is frozen stays, a circle or not
    assert told["thresholds"]


def test_seconds_of_collections_are_told_by_generation_from_then_on(told: dict[str, object]) -> None:
    assert told["before"] == []
    assert told["callbacks"] == 1
    seconds = told["seconds"]
    assert isinstance(seconds, list)
    assert len(seconds) == 3
    assert seconds[0] > 0
    assert seconds[2] > 0
