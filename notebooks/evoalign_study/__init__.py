"""The code behind the notebooks: runs, records, results, claims and artefacts of this paper."""

import warnings

with warnings.catch_warnings():
    # tqdm warns when first imported in a notebook without widgets; it then draws its bars as text, as we want
    warnings.filterwarnings("ignore", "IProgress not found")
    import tqdm.auto  # noqa: F401
