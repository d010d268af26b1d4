"""What the garbage collector may cost a process that serves. Knows nothing of what it holds."""

from __future__ import annotations

import gc
import threading
import time


class _Collections(threading.local):
    """CPU seconds of this thread that went into collecting everybody's garbage."""

    spent_s = 0.0
    since = 0.0

    def note(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self.since = time.thread_time()
        else:
            self.spent_s += time.thread_time() - self.since


_collections = _Collections()
gc.callbacks.append(_collections.note)


def working_time() -> float:
    """CPU seconds of this thread, without those in which it collected garbage.

    A collection visits every object of the process and runs in whichever thread allocated last,
    for tenths of a second where models and tokenizers are loaded: nothing that thread was asked
    to do is to blame for it.
    """
    return time.thread_time() - _collections.spent_s


def settle() -> None:
    """Collects once and leaves out of later collections what lives now: for after loading.

    Modules, models and tables stay as long as the process does. Without this, every few thousand
    requests a collection visits them all, and every session waits for it.
    """
    gc.collect()
    gc.freeze()
