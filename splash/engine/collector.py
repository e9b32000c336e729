"""What a process of ours does about Python's garbage collector once it has loaded what it serves with."""

from __future__ import annotations

import gc


def keep_from_collector() -> None:
    """Have collections pass over all that exists now, most of which stays until the end.

    A full collection walks every object, some 200,000 with torch loaded, and stops all threads for as long: a tenth of
    a second and more, in which no stream gets a token. What is let go later is freed as ever, unless it is in a cycle.
    """
    gc.collect()
    gc.freeze()
