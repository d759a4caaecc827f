"""Judges that compare two answers, either a reward model or a language model.

`judge_pairs` takes a `ScoreJudge`, which wraps any function that scores texts (a reward model, a rule), or a
`ChatJudge`, a language model with a `Rubric`. The language model runs behind an OpenAI-compatible address (`Endpoint`),
such as that of `vllm serve` or `transformers serve` on this machine.

A chat judge sees every pair in both orders. A win counts only if both orders agree on it; if the orders disagree, the
pair is a tie and is counted as inconsistent. A missing answer, or one without a verdict, is neither a tie nor a zero:
the pair is left out and counted separately. Answers are kept in a `Cache`, so that a killed tournament can resume and
a re-run costs nothing.

Judged texts come from models that may have learnt to talk to judges. Each text stands in a block whose first and last
lines carry a code derived from all texts and absent from all of them (`texts`), and anything in it that could be a chat
token or a verdict is broken up. This keeps a text from leaving its block. It cannot keep a judge from being persuaded
by what it reads; no format can.
"""

from evoalign_lib.judges.answers import ERRORS, Answer  # noqa: F401
from evoalign_lib.judges.cache import Cache, CacheError  # noqa: F401
from evoalign_lib.judges.endpoint import Endpoint, EndpointError  # noqa: F401
from evoalign_lib.judges.rubrics import SAFE_RLHF_HARMLESS, SAFE_RLHF_HELPFUL, Reading, Rubric  # noqa: F401
from evoalign_lib.judges.verdicts import (  # noqa: F401
    ChatJudge,
    Judged,
    Judgement,
    Order,
    Pair,
    ScoreJudge,
    judge_pairs,
)
