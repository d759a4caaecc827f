"""EvoAlign: Evolution Strategies and GRPO on language models, compared under one interface.

Each module is one room and is imported by its own name (`from evoalign_lib import paths`); importing the package
itself loads nothing heavy.
"""

__version__ = "0.1.0"
