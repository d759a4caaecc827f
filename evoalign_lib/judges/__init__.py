"""Judges: which of two answers is better, or how good is one; by a reward model or by a language model.

`judge_pairs` and `judge_texts` take a `ScoreJudge`, which wraps any function that scores texts (a reward model, a
rule), or a `ChatJudge`, a language model with a `Rubric`: behind an OpenAI-compatible address (`Endpoint`), in this
process by transformers (`LocalChat`) or by vLLM (`VLLMChat`).

A chat judge sees every pair in both orders. A win counts if both orders give it; orders that disagree are a tie and are
counted. An answer without a verdict, or none at all, is neither a tie nor a zero: the pair is left out and counted
apart. Answers are kept in a `Cache`, so that a tournament that was killed goes on and a re-run costs nothing.

Judged texts come from models that may have learnt to talk to judges. Each one stands in a block whose ends carry a code
derived from all texts and absent from all of them (`texts`), and what could be a chat token or a verdict in it is
broken. This keeps texts in their place. It does not make a judge deaf to them: one that is persuaded by what it reads
gives its verdict freely, and no format can prevent that.
"""

from evoalign_lib.judges.answers import ERRORS, Answer  # noqa: F401
from evoalign_lib.judges.cache import Cache, CacheError  # noqa: F401
from evoalign_lib.judges.endpoint import Endpoint, EndpointError  # noqa: F401
from evoalign_lib.judges.local import LocalChat, VLLMChat  # noqa: F401
from evoalign_lib.judges.rubrics import (  # noqa: F401
    ARENA,
    HARMLESS_SCORE,
    HELPFUL_SCORE,
    SAFE_RLHF_HARMLESS,
    SAFE_RLHF_HELPFUL,
    Reading,
    Rubric,
)
from evoalign_lib.judges.verdicts import (  # noqa: F401
    ChatJudge,
    Judged,
    JudgedTexts,
    Judgement,
    Order,
    Pair,
    ScoreJudge,
    judge_pairs,
    judge_texts,
)
