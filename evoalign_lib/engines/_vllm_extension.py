"""Set-up that vLLM imports in each of its workers before it loads a model.

A worker process imports the user's main module first, and with it perhaps `_vllm_worker`, long before vLLM. Hence this
separate module, whose import marks the moment in between.
"""

import sys

from evoalign_lib.engines._vllm_worker import WorkerExtension, end_with_driver, prepare

__all__ = ["WorkerExtension"]

if "vllm.platforms" in sys.modules:  # not when a tool imports it outside a worker
    prepare()
    end_with_driver()
