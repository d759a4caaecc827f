"""What vLLM imports in each of its workers before it loads a model, and nothing else does.

A worker process imports the user's main module first, and with it perhaps `_vllm_worker`, long before vLLM is there:
what has to happen in between is done by this import.
"""

import sys

from evoalign_lib.engines._vllm_worker import WorkerExtension, end_with_driver, prepare

__all__ = ["WorkerExtension"]

if "vllm.platforms" in sys.modules:  # else it is imported to be looked at
    prepare()
    end_with_driver()
