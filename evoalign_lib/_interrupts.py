"""Delay Ctrl-C until a block that must not be interrupted has ended."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold SIGINT (Ctrl-C, Jupyter's interrupt) back until the block has ended, then pass it to its usual handler.

    Blocks may be nested: an interrupt waits for the outermost one. Python runs signal handlers only in the main thread,
    so in any other thread nothing can interrupt the block and this does nothing. SIGKILL cannot be held back, nor can
    exceptions raised by a debugger or `PyThreadState_SetAsyncExc`.
    """
    handler = signal.getsignal(signal.SIGINT)
    # a handler installed by C code shows as None here and could not be restored
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
