"""Models beside the one that a run trains: scorers that it is trained on, and judges that it is not.

A *scorer* is a reward or cost model: a folder or a name on the Hub, loaded by the run, or the address of a server
(`evoalign serve-scorer`). A *chat judge* is a language model: a folder or a name on the Hub, or an address and a name
there ("http://localhost:8000/v1#Qwen/Qwen2.5-7B-Instruct") of an OpenAI-compatible endpoint.

A spec names each by its name, by what it computes with (digest) and by where it is (`at`). Of a server the first two
are what it says of itself. Addresses are in no spec: the process that made it remembers them (`worlds.know_address`).

With the local engine a run loads its scorers itself. With another one several processes may ask them, which see their
own GPUs alone: the run serves each in a process of its own (`served`) for as long as it trains. Chat judges are asked
when the run has ended, and may then have any GPU.

The environment variables EVOALIGN_SCORER_KEY and OPENAI_API_KEY hold the keys of servers and endpoints, if they need
any.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from evoalign_lib import judges, models, reward_models
from evoalign_lib.checks import choose
from evoalign_lib.files import canonical_json
from evoalign_lib.judges import ChatJudge, Endpoint, EndpointError, Judged, LocalChat, Pair
from evoalign_lib.reward_models import HTTPScorer, RewardModel, ScorerError, ScorerGone
from evoalign_lib.rewards import RewardOutage
from evoalign_study import base_models, paths
from evoalign_study.records import Spec

SIDES = ("reward", "cost")
"""The scorers that a run is trained on."""
SERVER, ENDPOINT = "server", "endpoint"
"""Where a model is that the run does not load."""
SCORER_KEY, JUDGE_KEY = "EVOALIGN_SCORER_KEY", "OPENAI_API_KEY"
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


def fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec that name its scorers and judges, each of which was looked at.

    Args:
        settings: reward_model, cost_model; reward_text, cost_text (formats of those that the run loads; one in
            Safe-RLHF's layout needs none); held_out (judges, separated by commas), held_out_text; scorer_device,
            scorer_dtype and scorer_max_length of what the run loads; judge_tokens, of an answer of a chat judge.

    Raises:
        ValueError: a model that is not there or is none of its kind, an address that does not answer, a judge that
            trains the run, two equal judges, or a setting that nothing of these reads.
    """
    found = [_scorer(side, str(settings.get(f"{side}_model") or ""), settings) for side in SIDES]
    given = [name.strip() for name in str(settings.get("held_out") or "").split(",") if name.strip()]
    found += [_judge(name, settings) for name in given]
    _check_different(found)
    wanted: dict[str, Any] = {}
    for one in found[:2]:
        wanted |= {f"{one.role}_model": one.name, f"{one.role}_digest": one.digest, f"{one.role}_at": one.at}
        wanted |= {f"{one.role}_text": one.text} if one.text else {}
    if held := found[2:]:
        for name in ("name", "kind", "digest", "at", "text"):
            wanted[f"held_out_{name}s"] = [getattr(one, name) for one in held]
    wanted |= {"judge_tokens": settings["judge_tokens"]} if any(one.kind == "chat" for one in held) else {}
    _check_read(found, settings)
    here = [one.name for one in found if one.kind == "scorer" and one.loaded]
    if here and settings.get("engine") == "ray":
        raise ValueError(
            f"engine='ray': machines of a cluster cannot ask a model that the run loads, such as {here[0]!r}. Start "
            "evoalign serve-scorer where all of them reach it, and give its address."
        )
    if any(one.loaded for one in found):
        wanted |= {name: settings[name] for name in ("scorer_dtype", "scorer_max_length") if settings.get(name)}
    return wanted


def of(spec: Mapping[str, Any]) -> list[Model]:
    """Return the models that a spec names: reward, cost, and the judges in their order."""
    sides = [
        Model(s, "scorer", spec[f"{s}_model"], spec[f"{s}_digest"], spec[f"{s}_at"], spec.get(f"{s}_text", ""))
        for s in SIDES
    ]
    names = ("held_out_kinds", "held_out_names", "held_out_digests", "held_out_ats", "held_out_texts")
    return sides + [Model("held_out", *row) for row in zip(*(spec.get(name, ()) for name in names), strict=True)]


def held_out(spec: Mapping[str, Any], kind: str) -> list[Model]:
    """Return the judges of a kind that a spec names."""
    return [one for one in of(spec) if one.role == "held_out" and one.kind == kind]


def _is_address(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _scorer(role: str, name: str, settings: Mapping[str, Any]) -> Model:
    parameter = "judge" if role == "held_out" else f"{role}_model"
    if not name:
        raise ValueError(
            f"{parameter} is not set: give a folder, a name on the Hub, or the address of evoalign serve-scorer."
        )
    if _is_address(name):
        try:
            identity = _identity(name)
        except (ScorerError, ValueError) as error:
            raise ValueError(f"{parameter}={name!r}: {error}") from error
        digest = reward_models.fingerprint(identity)
        base_models.know_address(digest, name)
        return Model(role, "scorer", identity["name"], digest, SERVER, "")
    text = settings.get(f"{role}_text") or None
    try:
        text = reward_models.check(name, text, settings.get("scorer_max_length") or None)
        return Model(role, "scorer", models.place(name), base_models.base_digest(name), _device(settings), text)
    except ValueError as error:
        hint = f" Set {role}_text." if "text is one of" in str(error) else ""
        raise ValueError(f"{parameter}={name!r}: {error}{hint}") from error


@lru_cache(maxsize=64)
def _identity(url: str) -> dict[str, Any]:
    """What a server says of its model, once per process: whoever opens it asks again."""
    return HTTPScorer(url, timeout=20, retries=1, api_key_env=_key(SCORER_KEY)).identity


def _key(variable: str) -> str | None:
    return variable if os.environ.get(variable, "").strip() else None


def _judge(name: str, settings: Mapping[str, Any]) -> Model:
    if _is_address(name) and "#" in name:
        url, _, called = name.partition("#")
        try:
            endpoint = Endpoint(called, url, max_tokens=settings["judge_tokens"])
            _check_endpoint(endpoint)
        except ValueError as error:
            raise ValueError(f"judge={name!r}: {error}") from error
        digest = hashlib.sha256(canonical_json(endpoint.identity()).encode()).hexdigest()[:16]
        base_models.know_address(digest, url)
        return Model("held_out", "chat", called, digest, ENDPOINT, "")
    if _is_address(name) or not _chats(name):
        return _scorer("held_out", name, settings)
    return Model("held_out", "chat", models.place(name), base_models.base_digest(name), _device(settings), "")


@lru_cache(maxsize=64)
def _chats(name: str) -> bool:
    """Whether a folder or a name on the Hub is a language model. Raises ValueError where it has no chat template."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        architectures = AutoConfig.from_pretrained(name, trust_remote_code=False).architectures
    except (OSError, ValueError):
        return False  # what is wrong with it is said where it is taken for a scorer
    if not next(iter(architectures or ()), "").endswith("ForCausalLM"):
        return False
    if not AutoTokenizer.from_pretrained(name, trust_remote_code=False).chat_template:
        raise ValueError(f"judge={name!r} has no chat template: give a model that was trained to chat.")
    return True


@lru_cache(maxsize=64)
def _check_endpoint(endpoint: Endpoint) -> None:
    """Raise ValueError for an endpoint that does not answer, refuses the key, or says that it has no such model.

    One that passes is asked once per process.
    """
    import openai

    if not endpoint.model:
        raise ValueError("no model is named: write the address, # and the model's name there.")
    key = os.environ.get(endpoint.api_key_env, "").strip()
    settings = {"base_url": endpoint.base_url, "timeout": 20, "max_retries": 0}
    with openai.OpenAI(api_key=key or "none", **settings) as client:
        try:
            known = [one.id for one in client.models.list()]
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            state = f"refuses the key in {endpoint.api_key_env}" if key else f"needs a key: set {endpoint.api_key_env}"
            raise ValueError(f"the endpoint {state} (HTTP {error.status_code}).") from None
        except openai.APIStatusError:
            return  # it answers, and lists no models
        except openai.APIError as error:
            raise ValueError(f"the endpoint does not answer ({type(error).__name__}): see whether it runs.") from None
    if known and endpoint.model not in known:
        raise ValueError(f"the endpoint has no model {endpoint.model!r}, it has {', '.join(known[:5])}.")


def _device(settings: Mapping[str, Any]) -> str:
    """The device of what the run loads."""
    import torch

    device = settings.get("scorer_device") or "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"scorer_device={device!r} is none of torch's: give 'cpu' or one such as 'cuda:1'.") from None
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and found.index is None):
        raise ValueError(f"scorer_device={device!r}: give 'cpu', or a GPU with its number, such as 'cuda:1'.")
    return str(found)


def _check_different(found: Sequence[Model]) -> None:
    trains = set(map(_weights, found[:2]))
    seen: set[tuple[str, str]] = set()
    for one in found[2:]:
        if _weights(one) in trains:
            raise ValueError(f"judge: {one.name!r} trains the run, and is held out of nothing: give another one.")
        if (one.digest, one.text) in seen:
            raise ValueError(f"judge: {one.name!r} is given twice.")
        seen.add((one.digest, one.text))


def _weights(one: Model) -> str:
    """What identifies a model's weights, whoever serves them."""
    return _identity(base_models.address_of(one.digest))["weights"] if one.at == SERVER else one.digest


def _check_read(found: Sequence[Model], settings: Mapping[str, Any]) -> None:
    """Refuse settings of models that the run loads where it loads none."""
    if settings.get("scorer_dtype"):
        choose("scorer_dtype", settings["scorer_dtype"], DTYPES)
    scorers = [one for one in found if one.kind == "scorer" and one.loaded]
    readers = {
        "scorer_device": [one for one in found if one.loaded],
        "scorer_dtype": [one for one in found if one.loaded],
        "scorer_max_length": scorers,
        **{f"{role}_text": [one for one in scorers if one.role == role] for role in (*SIDES, "held_out")},
    }
    for name, of_name in readers.items():
        if settings.get(name) and not of_name and settings[name] != "cpu":
            shown = "judge_text" if name == "held_out_text" else name
            raise ValueError(
                f"{shown}={settings[name]!r}: no model that the run loads reads it, since servers have settings of "
                "their own. Leave it out."
            )


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

    def begin(self) -> None:
        """Count from here on: a process may run several specs."""
        for kind in self.scorer.counts:
            self.scorer.counts[kind] = 0

    @property
    def counts(self) -> dict[str, int]:
        """What happened since the run began, or went on, in this process, by kind, as far as anything did."""
        return {kind: count for kind, count in self.scorer.counts.items() if count}


def opened(spec: Mapping[str, Any], one: Model) -> OrStop:
    """Return a scorer that a spec names, once per process.

    Raises:
        ValueError: it is not the one that the spec was made with, or cannot be loaded.
        FileNotFoundError: this process was not told where its server is.
        ScorerError: the server does not answer.
    """
    return _opened(one, spec.get("scorer_dtype"), spec.get("scorer_max_length"), base_models.address_of(one.digest))


@lru_cache(maxsize=16)
def _opened(one: Model, dtype: str | None, max_length: int | None, address: str | None) -> OrStop:
    if address is None and not one.loaded:
        raise FileNotFoundError(
            f"the {one.role} model {one.name!r} ({one.digest}): this process was not told its address. Make the specs "
            "again with the address of its server."
        )
    if address is not None:
        scorer = HTTPScorer(address, timeout=_TIMEOUT, retries=_RETRIES, api_key_env=_key(SCORER_KEY))
        found = scorer.identity["weights"] if one.loaded else reward_models.fingerprint(scorer.identity)
        known = not one.loaded or os.path.isdir(one.name)  # of a name on the Hub the server knows the files, not that
    else:
        found, known = models.origin_digest(one.name), True
        scorer = RewardModel(one.name, text=one.text, device=one.at, dtype=dtype, max_length=max_length)
    if known and found != one.digest:
        raise ValueError(
            f"the {one.role} model {one.name!r} is another one now ({found}, in the spec {one.digest}): restore it, or "
            "make the specs again."
        )
    return OrStop(scorer)


@contextmanager
def served(spec: Spec) -> Iterator[None]:
    """Serve the scorers that a run loads, each in a process of its own, where other processes than this one ask them.

    With the local engine there are none: this process loads the scorers here. The servers end with the context, and
    with this process if it is killed. Either way, what is wrong with a scorer is found before anything is trained.

    Raises RuntimeError where a server ends before it answers, with the end of what it wrote; and as `opened`.
    """
    scorers = [one for one in of(spec) if one.kind == "scorer"]
    loaded = {} if base_models.is_local(spec) else {one.digest: one for one in scorers if one.loaded}
    with ExitStack() as stack:
        started = {digest: stack.enter_context(_server(spec, one)) for digest, one in loaded.items()}
        for digest, wait in started.items():
            base_models.know_address(digest, wait())
            stack.callback(base_models.forget_address, digest)
        for one in scorers:
            opened(spec, one).begin()
        yield


@contextmanager
def _server(spec: Mapping[str, Any], one: Model) -> Iterator[Any]:
    """Start a server; yield what waits until it answers, and returns its address."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    settings = {"text": one.text, "port": port, "device": one.at, "dtype": spec.get("scorer_dtype")}
    settings |= {"max_length": spec.get("scorer_max_length")}
    code = (
        f"from evoalign_lib.engines.processes import end_with; end_with({os.getpid()})\n"
        f"from evoalign_lib.scoring_server import serve; serve({one.name!r}, **{settings!r})"
    )
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=subprocess.STDOUT)

        def wait() -> str:
            url = f"http://127.0.0.1:{port}"
            while process.poll() is None:
                try:
                    HTTPScorer(url, timeout=5, retries=0)
                except ScorerError:
                    time.sleep(0.2)  # weights of many GB are being read
                else:
                    return url
            log.seek(0)
            said = "\n".join(log.read().decode(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"the server of the {one.role} model {one.name!r} ended:\n{said}")

        try:
            yield wait
        finally:
            process.terminate()
            process.wait()


# ---- chat judges


def judged(spec: Mapping[str, Any], pairs: Sequence[Pair]) -> list[tuple[Model, str, Judged]]:
    """Return what each chat judge of a spec says of pairs, by each of `RUBRICS`: judge, rubric and verdicts.

    Answers are kept in judges/<digest>.jsonl below EVOALIGN_RUN_DIR, or below runs: what was interrupted goes on there.

    Raises:
        ValueError: a judge that is not the one that the spec was made with.
        FileNotFoundError: this process was not told where an endpoint is.
        EndpointError: an endpoint is gone; what was answered is kept.
    """
    folder = Path(os.environ.get("EVOALIGN_RUN_DIR") or paths.RUNS) / "judges"
    found = []
    for one in held_out(spec, "chat"):
        folder.mkdir(parents=True, exist_ok=True)
        backend = _backend(spec, one)
        for name, rubric in RUBRICS.items():
            said = judges.judge_pairs(ChatJudge(backend, rubric), pairs, folder / f"{one.digest}.jsonl")
            if all(judgement.failed in ("connection", "timeout", "http") for judgement in said.judgements):
                raise EndpointError(
                    f"the judge {one.name!r} answered nothing: see whether it runs, and run this again."
                )
            found.append((one, name, said))
    return found


def _backend(spec: Mapping[str, Any], one: Model) -> Endpoint | LocalChat:
    if one.at == ENDPOINT:
        if (url := base_models.address_of(one.digest)) is None:
            raise FileNotFoundError(
                f"the judge {one.name!r}: this process was not told its address. Make the specs again with it."
            )
        return Endpoint(one.name, url, timeout=_TIMEOUT, max_tokens=spec["judge_tokens"])
    if (digest := models.origin_digest(one.name)) != one.digest:
        raise ValueError(f"the judge {one.name!r} has changed ({digest}, in the spec {one.digest}): restore it.")
    dtype = spec.get("scorer_dtype") or ("float32" if one.at == "cpu" else "bfloat16")
    return LocalChat(one.name, device=one.at, max_tokens=spec["judge_tokens"], dtype=dtype)
