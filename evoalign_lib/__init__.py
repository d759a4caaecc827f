"""EvoAlign: Evolution Strategies and GRPO on language models, compared under one interface.

`from evoalign_lib import ESConfig, ESTrainer` gives the trainer. Every other module is one room and is imported by its
own name (`from evoalign_lib import paths`); importing the package itself loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evoalign_lib.es import ESConfig, ESTrainer

__version__ = "0.1.0"
__all__ = ["ESConfig", "ESTrainer"]


def __getattr__(name: str) -> Any:
    """Import the trainer, and torch with it, when it is first asked for (PEP 562)."""
    if name in __all__:
        from evoalign_lib import es

        return getattr(es, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
