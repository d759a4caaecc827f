"""What stands behind the notebooks: a file per notebook with its presets, its groups of runs and its numbers.

`presets(model)` gives the settings of each scale, `groups(run, of)` the runs by name, and `numbers(run, of, ...)` the
numbers that the paper quotes, from the records. `loading` has what they share: the loader of groups.
"""

import warnings

with warnings.catch_warnings():
    # on its first import, in a notebook without widgets; its bars are drawn as text then, which is what we want
    warnings.filterwarnings("ignore", "IProgress not found")
    import tqdm.auto  # noqa: F401
