"""Models beside the one that a run trains: scorers that it is trained on, and judges that it is not.

A *scorer* is a reward or cost model: a folder or a name on the Hub, loaded by the run, or the address of a server
(`evoalign serve-scorer`). With another engine than the local one several processes ask them, which see their own GPUs
alone: the scorers are served then. A *chat judge* is a language model behind an OpenAI-compatible endpoint: an address
and a name there ("http://localhost:8000/v1#Qwen/Qwen2.5-7B-Instruct"). It is asked when the run has ended.

A spec names each by its name, by what it computes with (digest) and by where it is (`at`). Of a server the first two
are what it says of itself. Addresses are in no spec: the process that made it remembers them
(`base_models.know_files`).

The environment variables EVOALIGN_SCORER_KEY and OPENAI_API_KEY hold the keys of servers and endpoints, if they need
any.
"""

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from evoalign_lib import judges, models, reward_models
from evoalign_lib.checks import choose, require
from evoalign_lib.judges import ChatJudge, Endpoint, EndpointError, Judged, Pair
from evoalign_lib.reward_models import HTTPScorer, RewardModel, ScorerError, ScorerGone
from evoalign_lib.rewards import RewardOutage
from evoalign_study import base_models
from evoalign_study.records import Settings, spec_hash

SIDES = ("reward", "cost")
"""The scorers that a run is trained on."""
SERVER, ENDPOINT = "server", "endpoint"
"""Where a model is that the run does not load."""
RUBRICS = {"helpful": judges.SAFE_RLHF_HELPFUL, "harmless": judges.SAFE_RLHF_HARMLESS}
"""What a chat judge is asked of every pair, in both orders."""
DTYPES = ("float32", "bfloat16", "float16")
_TIMEOUT, _RETRIES = 300.0, 10  # a scorer that is started anew within a minute is found again


class Model(NamedTuple):
    """A model beside the one that is trained, as a spec names it."""

    role: str
    """"reward", "cost" or "held_out" """
    kind: str
    """"scorer" or "chat" """
    name: str
    digest: str
    at: str
    """a torch device, `SERVER` or `ENDPOINT`"""
    text: str
    """format of a scorer that the run loads (`reward_models.TEXTS`); else empty"""

    @property
    def loaded(self) -> bool:
        """Whether the run loads it."""
        return self.at not in (SERVER, ENDPOINT)


# ---- specs


def fields(settings: Settings) -> dict[str, Any]:
    """Return the fields of a spec that name its scorers and judges, each of which was looked at.

    Args:
        settings: reward_model, cost_model; reward_text, cost_text (formats of those that the run loads; one in
            Safe-RLHF's layout needs none); held_out (judges, separated by commas), held_out_text; scorer_device,
            scorer_dtype and scorer_max_length of what the run loads; judge_tokens, of an answer of a chat judge.

    Raises:
        ValueError: a model that is not there or is none of its kind, an address that does not answer, a judge that
            trains the run, two equal judges, a scorer that is loaded where several processes ask it, or a setting that
            nothing of these reads.
    """
    trains = [_scorer(side, str(settings.get(f"{side}_model") or ""), settings) for side in SIDES]
    names = [name.strip() for name in str(settings.get("held_out") or "").split(",") if name.strip()]
    held = [_judge(name, settings) for name in names]
    for i, one in enumerate(held):
        apart = _weights(one) not in map(_weights, trains)
        require(apart, f"judge: {one.name!r} trains the run, and is held out of nothing: give another one.")
        before = [(other.digest, other.text) for other in held[:i]]
        require((one.digest, one.text) not in before, f"judge: {one.name!r} is given twice.")
    loaded = [one for one in (*trains, *held) if one.loaded]
    _check_read(loaded, settings)
    if loaded and not base_models.is_local(settings):
        remedy = "start evoalign serve-scorer where all of them reach it, and give its address"
        raise ValueError(f"engine={settings['engine']!r}: several processes ask {loaded[0].name!r}: {remedy}.")
    wanted: dict[str, Any] = {}
    for one in trains:
        wanted |= {f"{one.role}_model": one.name, f"{one.role}_digest": one.digest, f"{one.role}_at": one.at}
        wanted |= {f"{one.role}_text": one.text} if one.text else {}
    wanted |= {f"held_out_{name}s": [getattr(one, name) for one in held] for name in _NAMES if held}
    if any(one.kind == "chat" for one in held):
        wanted["judge_tokens"] = settings["judge_tokens"]
    return wanted | {name: settings[name] for name in _OF_LOADED[1:] if loaded and settings.get(name)}


_NAMES = ("kind", "name", "digest", "at", "text")
_OF_LOADED = ("scorer_device", "scorer_dtype", "scorer_max_length")


def of(spec: Mapping[str, Any]) -> list[Model]:
    """Return the models that a spec names: reward, cost, and the judges in their order."""
    named = ("model", "digest", "at", "text")
    sides = [Model(side, "scorer", *(spec.get(f"{side}_{name}", "") for name in named)) for side in SIDES]
    columns = (spec.get(f"held_out_{name}s", ()) for name in _NAMES)
    return sides + [Model("held_out", *row) for row in zip(*columns, strict=True)]


def held_out(spec: Mapping[str, Any], kind: str) -> list[Model]:
    """Return the judges of a kind that a spec names."""
    return [one for one in of(spec) if one.role == "held_out" and one.kind == kind]


def _is_address(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _scorer(role: str, name: str, settings: Settings) -> Model:
    parameter = "judge" if role == "held_out" else f"{role}_model"
    require(name, f"{parameter} is not set: give a folder, a name on the Hub, or the address of a server.")
    try:
        if _is_address(name):
            identity = _identity(name)
            digest = reward_models.fingerprint(identity)
            base_models.know_files({digest: name})
            return Model(role, "scorer", identity["name"], digest, SERVER, "")
        text = settings.get(f"{role}_text") or None
        text = reward_models.check(name, text, settings.get("scorer_max_length") or None)
        return Model(role, "scorer", models.place(name), base_models.base_digest(name), _device(settings), text)
    except (ScorerError, ValueError) as error:
        hint = f" Set {role}_text." if "text is one of" in str(error) else ""
        raise ValueError(f"{parameter}={name!r}: {error}{hint}") from error


@lru_cache(maxsize=64)
def _identity(url: str) -> dict[str, Any]:
    """What a server says of its model, once per process: whoever opens it asks again."""
    return _served(url, timeout=20, retries=1).identity


def _served(url: str, **how: Any) -> HTTPScorer:
    key = "EVOALIGN_SCORER_KEY"
    return HTTPScorer(url, api_key_env=key if os.environ.get(key, "").strip() else None, **how)


def _judge(name: str, settings: Settings) -> Model:
    url, chats, called = name.partition("#")
    if not (chats and _is_address(name)):
        return _scorer("held_out", name, settings)
    endpoint = Endpoint(called, url, max_tokens=settings["judge_tokens"])
    _check_endpoint(endpoint)
    digest = spec_hash(endpoint.identity())
    base_models.know_files({digest: url})
    return Model("held_out", "chat", called, digest, ENDPOINT, "")


@lru_cache(maxsize=64)
def _check_endpoint(endpoint: Endpoint) -> None:
    """Refuse an endpoint that would fail on every question; one that passes is asked once per process.

    Raises:
        ValueError: it does not answer, refuses the key, or says that it has no such model.
    """
    import openai

    judge, key = f"judge={endpoint.model!r} at {endpoint.base_url}", os.environ.get(endpoint.api_key_env, "").strip()
    try:
        with openai.OpenAI(api_key=key or "none", base_url=endpoint.base_url, timeout=20, max_retries=0) as client:
            known = [one.id for one in client.models.list()]
    except openai.APIError as error:
        status = getattr(error, "status_code", None)
        if status in (401, 403, None):
            refused = f"refuses the key (HTTP {status})" if status else f"does not answer ({type(error).__name__})"
            raise ValueError(f"{judge} {refused}: see whether it runs, and set {endpoint.api_key_env}.") from None
        known = []  # it answers, and lists no models
    if not endpoint.model or (known and endpoint.model not in known):
        raise ValueError(f"{judge}: write the address, # and the name of a model there, such as {known[:5]}.")


def _device(settings: Settings) -> str:
    """The device of what the run loads."""
    device = str(settings.get("scorer_device") or "cpu")
    known = re.fullmatch(r"cpu|cuda:\d+", device)
    require(known, f"scorer_device={device!r}: give 'cpu', or a GPU with its number, such as 'cuda:1'.")
    return device


def _weights(one: Model) -> str:
    """What identifies a model's weights, whoever serves them."""
    return _identity(_address(one))["weights"] if one.at == SERVER else one.digest


def _check_read(loaded: Sequence[Model], settings: Settings) -> None:
    """Refuse settings of models that the run loads where it loads none."""
    if settings.get("scorer_dtype"):
        choose("scorer_dtype", settings["scorer_dtype"], DTYPES)
    read = {f"{one.role}_text" for one in loaded} | (set(_OF_LOADED) if loaded else set())
    for name in (*_OF_LOADED, *(f"{role}_text" for role in (*SIDES, "held_out"))):
        value, shown = settings.get(name), name.replace("held_out", "judge")
        fits = not value or name in read or value == "cpu"
        require(fits, f"{shown}={value!r}: no model that the run loads reads it. Leave it out.")


# ---- scorers


class OrStop:
    """A scorer in a run: where its server is gone the run ends, to be resumed, rather than go on with floors.

    What can not be scored by a server that works scores the floor of the task and is counted (`rewards`).
    """

    def __init__(self, scorer: RewardModel | HTTPScorer):
        self.scorer, self.name = scorer, scorer.name

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> Any:
        """Return a score for each completion, float64 (completions,). Raises as the scorer, and RewardOutage."""
        try:
            return self.scorer.score(prompts, completions)
        except ScorerGone as error:
            raise RewardOutage(f"{error} Start it again, and run this again: the run goes on where it was.") from error

    @property
    def counts(self) -> dict[str, int]:
        """What happened since the run began, or went on, in this process, by kind, as far as anything did."""
        return {kind: count for kind, count in self.scorer.counts.items() if count}


def prepare(spec: Mapping[str, Any]) -> None:
    """Open the scorers of a spec, before anything is trained, and count what happens from here on.

    Raises:
        ValueError, FileNotFoundError, ScorerError: as `opened`.
    """
    for one in of(spec):
        if one.kind == "scorer":
            counts = opened(spec, one).scorer.counts
            counts.update(dict.fromkeys(counts, 0))  # a process may run several specs


def opened(spec: Mapping[str, Any], one: Model) -> OrStop:
    """Return a scorer that a spec names, once per process.

    Raises:
        ValueError: it is not the one that the spec was made with, or cannot be loaded.
        FileNotFoundError: this process was not told where its server is.
        ScorerError: the server does not answer.
    """
    address = None if one.loaded else _address(one)
    return _opened(one, spec.get("scorer_dtype"), spec.get("scorer_max_length"), address)


@lru_cache(maxsize=16)
def _opened(one: Model, dtype: str | None, max_length: int | None, address: str | None) -> OrStop:
    if address is None:
        _check_same(one, models.origin_digest(one.name))
        return OrStop(RewardModel(one.name, text=one.text, device=one.at, dtype=dtype, max_length=max_length))
    scorer = _served(address, timeout=_TIMEOUT, retries=_RETRIES)
    _check_same(one, reward_models.fingerprint(scorer.identity))
    return OrStop(scorer)


def _address(one: Model) -> str:
    if (address := base_models.known_files().get(one.digest)) is None:
        unknown = f"the {one.role} model {one.name!r} ({one.digest}): this process was not told its address"
        raise FileNotFoundError(f"{unknown}. Make the specs again with it.")
    return address


def _check_same(one: Model, digest: str) -> None:
    now = f"the {one.role} model {one.name!r} is another one now ({digest}, in the spec {one.digest})"
    require(digest == one.digest, f"{now}: restore it, or make the specs again.")


# ---- chat judges


def judged(spec: Mapping[str, Any], pairs: Sequence[Pair]) -> list[tuple[Model, str, Judged]]:
    """Return what each chat judge of a spec says of pairs, by each of `RUBRICS`: judge, rubric and verdicts.

    Answers are kept in judges/<digest>.jsonl below EVOALIGN_RUN_DIR, or below runs: what was interrupted goes on there.

    Raises:
        FileNotFoundError: this process was not told where an endpoint is.
        EndpointError: an endpoint is gone; what was answered is kept.
    """
    folder = base_models.kept("judges")
    verdicts = []
    for one in held_out(spec, "chat"):
        folder.mkdir(parents=True, exist_ok=True)
        backend = Endpoint(one.name, _address(one), timeout=_TIMEOUT, max_tokens=spec["judge_tokens"])
        for name, rubric in RUBRICS.items():
            said = judges.judge_pairs(ChatJudge(backend, rubric), pairs, folder / f"{one.digest}.jsonl")
            if all(judgement.failed in ("connection", "timeout", "http") for judgement in said.judgements):
                raise EndpointError(f"the judge {one.name!r} answered nothing: see whether it runs, run this again.")
            verdicts.append((one, name, said))
    return verdicts
