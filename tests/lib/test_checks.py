"""Checks of settings: what they let through, and what their errors say."""

import numpy as np
import pytest

from evoalign_lib.checks import nearest, whole_number


def test_nearest_names_one_known_name_or_none():
    assert nearest("stpes", {"steps", "seeds", "sigma"}) == " Did you mean 'steps'?"
    assert nearest("stpes", {"steps"}, cutoff=0.9) == "" == nearest("stpes", ())
    assert nearest(3, ["13", "x"], cutoff=0.0) == " Did you mean '13'?"
    # equally near: the same one on every machine, whatever the order of a set
    assert nearest("ab", {"ac", "ad"}) == nearest("ab", ["ad", "ac"])


@pytest.mark.parametrize("value", [1, 8, -3, 2.0, True, "3", None, np.float64(3), np.bool_(True)])
def test_what_is_no_whole_number_within_the_bounds_is_refused(value):
    with pytest.raises(ValueError, match=r"^seeds=.* must be a whole number from 2 to 7: there are 7\.$"):
        whole_number("seeds", value, 2, 7, "there are 7")
