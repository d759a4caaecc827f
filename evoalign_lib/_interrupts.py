"""Ctrl-C that waits until what must not be cut in two is done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold SIGINT (Ctrl-C, Jupyter's interrupt) back until the block has ended; then its usual handler gets it.

    Blocks may be nested: an interrupt waits for the outermost. Python runs handlers of signals in the main thread only,
    so that in any other thread nothing interrupts the block and nothing is done. SIGKILL cannot be held back, nor can
    exceptions that a debugger or `PyThreadState_SetAsyncExc` raises.
    """
    handler = signal.getsignal(signal.SIGINT)
    # a handler that C code has installed is None here and could not be put back
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    came = False

    def wait(number, frame):
        nonlocal came
        came = True

    try:
        signal.signal(signal.SIGINT, wait)
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
