"""What several files of tests share."""

import pytest


@pytest.fixture(scope="session")
def committed_verdicts():
    """Every claim judged in full by the committed records, once."""
    from evoalign_lib import claims

    return claims.evaluate_all()
