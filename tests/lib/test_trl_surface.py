"""What a user of TRL's `GRPOTrainer` finds here: the table of the site's page is complete, and proof of each line."""

import dataclasses
import inspect
import sys
from pathlib import Path

import pytest
from helpers import ROWS, random_model, token_sum, tokenizer
from transformers import TrainingArguments

from evoalign_lib.es import SURFACE, ESConfig, ESTrainer

sys.path.append(str(Path(__file__).parents[2] / "site"))  # no package
import from_trl

# Settings that the callbacks of trackers read, `push_to_hub` reads, or only the user's own script
TRACKERS = {"run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"}
HUB = {"hub_model_id", "hub_token", "hub_private_repo", "hub_revision"}
SCRIPTS = {"do_train", "do_eval", "do_predict", "resume_from_checkpoint"}


@pytest.mark.parametrize("section", from_trl.HEADINGS)
def test_the_table_names_all_that_trl_has_and_nothing_else(section):
    assert sorted(SURFACE[section]) == sorted(from_trl.of_trl()[section])


def test_the_page_is_up_to_date():
    assert from_trl.PAGE.read_text(encoding="utf-8") == from_trl.page(), "python site/from_trl.py writes it anew"


def test_what_is_the_same_is_there():
    fields = {f.name for f in dataclasses.fields(ESConfig)}
    parameters = inspect.signature(ESTrainer.__init__).parameters
    found = {"arguments": parameters, "settings": fields, "methods": dir(ESTrainer)}
    for section, there in found.items():
        for name, (status, _) in SURFACE[section].items():
            inherited = section == "settings" and name in {f.name for f in dataclasses.fields(TrainingArguments)}
            assert inherited or (name in there) == (status == "same"), name


def test_what_a_method_does_not_take_is_named():
    from trl import GRPOTrainer

    for name, (status, remark) in SURFACE["methods"].items():
        if status == "same":
            ours = inspect.signature(getattr(ESTrainer, name)).parameters
            for parameter, of in inspect.signature(getattr(GRPOTrainer, name)).parameters.items():
                named = parameter in ours or parameter in remark or parameter.startswith("_")
                assert named or of.kind is of.VAR_KEYWORD, (name, parameter)


# ---- refusals


def other(value):
    """A value that differs from a setting's default."""
    if isinstance(value, bool) or value is None:
        return not value
    return value + 1 if isinstance(value, (int, float)) else ["other"] if isinstance(value, list) else "other"


def test_every_setting_without_effect_is_refused_with_its_reason_and_all_at_once():
    fields = {f.name: f for f in dataclasses.fields(ESConfig)}
    known = SURFACE["settings"].items()
    refused = {name: why for name, (status, why) in known if status == "refused" and name in fields}
    defaults = {n: f.default if f.default_factory is dataclasses.MISSING else [] for n, f in fields.items()}
    given = {name: other(defaults[name]) for name in refused}
    with pytest.raises(ValueError, match=f"{len(refused)} settings cannot stay") as caught:
        ESConfig(**given)
    assert all(f"- {n}={given[n]!r} has no effect on ES: {why}." in str(caught.value) for n, why in refused.items())
    own = {name: why for name, (status, why) in known if status != "same" and name not in fields}
    with pytest.raises(TypeError) as caught:
        ESConfig(**dict.fromkeys(own, 1))
    assert all(f"- ESConfig has no setting {name!r}: {why}." in str(caught.value) for name, why in own.items())


def test_every_setting_that_is_accepted_is_read(tmp_path):
    """The whole of TrainingArguments: a run with evaluations and checkpoints, resumed, reads what is not refused."""
    from transformers.integrations import integration_utils

    read = set()

    class Watched(ESConfig):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    # by the classes' name: ESConfig reads every setting when it is made
    settings = {"population_size": 2, "max_completion_length": 2, "workers": 1, "report_to": "none"}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    sizes = {"max_steps": 1}, {"num_train_epochs": 2}
    first, again = (Watched(output_dir=str(tmp_path), **settings | size) for size in sizes)
    read.clear()
    for args, resume in ((first, None), (again, True)):
        tested = ESTrainer(random_model(), token_sum, args, ROWS[:2], ROWS[:2], tokenizer())
        tested.train(resume_from_checkpoint=resume)
    source = inspect.getsource(integration_utils)
    assert all(f"args.{name}" in source for name in TRACKERS)
    for field in dataclasses.fields(TrainingArguments):
        if SURFACE["settings"][field.name][0] == "same":
            assert field.name in read | TRACKERS | HUB | SCRIPTS, field.name


def test_every_argument_that_is_not_taken_is_refused_with_its_reason():
    refused = {name: why for name, (status, why) in SURFACE["arguments"].items() if status != "same"}
    with pytest.raises(TypeError) as caught:
        ESTrainer("A0", len, **dict.fromkeys(refused))
    for name, why in refused.items():
        assert f"ESTrainer takes no {name!r}: {why}." in str(caught.value)
    with pytest.raises(TypeError, match=r"ESTrainer takes no 'eval_datset'\. Did you mean 'eval_dataset'\?"):
        ESTrainer("A0", len, eval_datset=[])


def test_every_method_that_there_is_not_says_why():
    trainer = object.__new__(ESTrainer)
    for name, (status, why) in SURFACE["methods"].items():
        if status != "same":
            with pytest.raises(AttributeError) as caught:
                getattr(trainer, name)
            assert f"ESTrainer has no {name!r}: {why}." in str(caught.value)
    with pytest.raises(AttributeError, match=r"ESTrainer has no 'xyzzy'\.$"):
        trainer.xyzzy  # noqa: B018
