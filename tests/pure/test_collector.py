"""What has been loaded is no longer the collector's concern; what comes later is."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc, weakref
from splash.engine.collector import keep_from_collector
class Node: pass
def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)
before = len(gc.get_objects())
keep_from_collector()
later = cycle()
gc.collect()
print(before > 1000, len(gc.get_objects()) < 100, later() is None)
"""


def test_collections_pass_over_what_is_there_and_find_what_comes_later() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3
