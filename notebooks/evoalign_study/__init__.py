"""The code behind the notebooks: runs, records, results, claims and artefacts of this paper."""

import warnings

with warnings.catch_warnings():
    # on its first import, in a notebook without widgets; its bars are drawn as text then, which is what we want
    warnings.filterwarnings("ignore", "IProgress not found")
    import tqdm.auto  # noqa: F401
