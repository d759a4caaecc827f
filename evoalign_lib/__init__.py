"""EvoAlign: Evolution Strategies and GRPO on language models, compared under one interface.

`from evoalign_lib import ESConfig, ESTrainer` gives the trainer. Import every other module by its own name
(`from evoalign_lib import noise`); importing the package itself loads nothing heavy.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evoalign_lib.es import ESConfig, ESTrainer

__version__ = "0.1.0"
__all__ = ["ESConfig", "ESTrainer"]

# Where torchao is installed, transformers imports it with every model. Two of its messages are no use here: one about
# kernels that a CPU build of torch cannot load and no quantised base uses, one about an old way to declare enums.
logging.getLogger("torchao").addFilter(lambda record: not str(record.msg).startswith("Failed to load "))
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "is an Enum subclass" not in str(record.msg))


def __getattr__(name: str) -> Any:
    """Import the trainer, and torch with it, on first access (PEP 562)."""
    if name in __all__:
        from evoalign_lib import es

        return getattr(es, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
