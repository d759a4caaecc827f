"""Imported by vLLM alone, in each of its workers, before it loads a model.

A worker process imports the user's main module first, and with it perhaps `_vllm_worker`, long before vLLM: this import
does what has to happen in between.
"""

import sys

from evoalign_lib.engines._vllm_worker import WorkerExtension, end_with_driver, prepare

__all__ = ["WorkerExtension"]

if "vllm.platforms" in sys.modules:  # else somebody only looks at it
    prepare()
    end_with_driver()
