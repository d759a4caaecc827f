"""Mathematics: answers equal in value are right however they are written; hostile ones end in time; nothing is run."""

import json
import re
import threading
import time

import pytest
from helpers import refused

from evoalign_lib import tasks
from evoalign_lib.rewards import DataError, Rewards
from evoalign_lib.tasks import mathematics

pytest.importorskip("math_verify", reason="the extra `tasks` is not installed")

SAME = [
    ("72.0", "72"), (r"\$72", "72"), (r"72 \text{ apples}", "72"), ("1,072", "1072"), ("18.50 dollars", "18.5"),
    (r"\frac12", "1/2"), ("0.5", r"\dfrac{1}{2}"), (r"3\frac{1}{2}", "7/2"), ("5", "x=5"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"), ("Evelyn", r"\text{Evelyn}"),
    ("C", r"\text{(C)}"), (r"1-\sqrt{19},1+\sqrt{19}", r"1 \pm \sqrt{19}"), (r"\{2,1\}", r"\{1,2\}"),
    (r"90^\circ", "90"), ("4x^2+4x+1", "(2x+1)^2"), (r"x \in [-2,7]", "[-2,7]"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"), (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"4.5 \times 10^{33}", "4.5e33"), (r"12\text{ and }13", "12, 13"), ("48 + 24", "72"),
]  # fmt: skip
OTHER = [("73", "72"), ("72, 73", "72"), ("7 2", "72"), ("7.2", "72"), ("", "72"), ("72x", "72"), ("720", "72")]
OTHER += [("(2,1)", "(1,2)"), ("0.3", "1/3"), ("B", r"\text{(C)}"), ("x<5", "x>5"), (r"[0,\infty)", r"(0,\infty)")]
OTHER += [("not 72", "72"), (r"\text{72 or 73}", "72"), (r"\frac{72}{0}", "72"), ("x", "72"), ("Eve", r"\text{Evelyn}")]


@pytest.mark.parametrize(("said", "right", "same"), [(*a, True) for a in SAME] + [(*a, False) for a in OTHER])
def test_value_counts_not_form(said: str, right: str, same: bool) -> None:
    assert mathematics.grade(f"First \\boxed{{9}}. The answer is $\\boxed{{{said}}}$.", [right]) is same
    assert mathematics.grade(f"\\boxed{{{said}}}", ["(-1,-1)", right]) is same  # one of several


ENDS = [("it is 72", "boxed", None), ("72 \\boxed{7", "boxed", None), ("\\fbox{\\{1\\}}", "boxed", "\\{1\\}")]
ENDS += [("#### 5\n#### 72\nso", "hashes", "72"), ("72", "hashes", None), ("\\boxed{1/2} 3", "anywhere", "1/2")]
ENDS += [("\\boxed{7}, within \\boxed{ }", "boxed", "7"), ("1) Add.\n 2. So 72.", "anywhere", "Add.\nSo 72.")]


@pytest.mark.parametrize(("completion", "extraction", "found"), ENDS)
def test_where_the_answer_stands(completion: str, extraction: str, found: str | None) -> None:
    assert mathematics.answer(completion, extraction) == found


@pytest.mark.parametrize(
    "text", ["The answer is 72.", "48 + 24 = 72 clips.", "The final answer is $72$", "It costs $72.00."]
)
def test_without_a_box_an_answer_is_found_if_asked_for(text: str) -> None:
    assert mathematics.grade(text, ["72"], "anywhere") and not mathematics.grade(text, ["73"], "anywhere")
    assert not mathematics.grade(text, ["72"])


def test_hostile_answers_end_in_time_in_any_thread_and_are_counted() -> None:
    deep, long = "{" * 480 + "1" + "}" * 480, "\\boxed{" + "x" * 100_000
    hostile = ["9^{9^{9^{9}}}", "9**9**9", "9^{99999999}", "99999999!", "((9!)!)!", "9" * 2000]
    quick = [f"\\boxed{{{each}}}" for each in hostile] + [
        long,
        long + "}",
        "\\boxed{" * 20_000,
        "\\boxed{}" * 20_000,
        "$" * 100_000,
    ]
    assert mathematics.grade("\\boxed{\\frac{144}{2}}", ["72.0"])  # what is loaded on first use does not count
    scored, rewards = [], Rewards(mathematics.reward)
    assert (
        rewards.timeout == mathematics.REWARD_TIMEOUT == 10.0
        and Rewards(mathematics.reward, timeout=2.0).timeout == 2.0
    )
    rewards.timeout = 3.0

    def run() -> None:
        said = [*quick, f"\\boxed{{{deep}}}", "\\boxed{\\frac{144}{2}}"]
        scored.append(rewards(["p"] * len(said), said, [[1]] * len(said), {"answer": ["72"] * len(said)}))

    started = time.perf_counter()
    (thread := threading.Thread(target=run)).start()
    thread.join()
    assert scored[0].rewards.tolist() == [0.0] * (len(quick) + 1) + [1.0] and time.perf_counter() - started < 60
    assert scored[0].failures["timeout"] == 1 and sum(scored[0].failures.values()) == 1


INJECTED = ["__import__('os').system('touch {0}')", "f(open('{0}','w'))", "\\operatorname{{open}}('{0}', 'w')"]
INJECTED += ["\\text{{__import__('os').mkdir('{0}')}}", "x_{{open('{0}','w')}}", "\\max(open('{0}','w'),1)", "exit()"]
INJECTED += ["print(1)", "eval(1)", "1 if exit() else 2", "(1).__class__", "f(exit())", "lambda: 1"]


def test_no_letter_of_an_answer_is_evaluated(tmp_path, monkeypatch) -> None:
    from sympy.parsing import sympy_parser

    seen, original = [], sympy_parser.eval_expr
    monkeypatch.setattr(sympy_parser, "eval_expr", lambda code, *a: (seen.append(code), original(code, *a))[1])
    for text in (each.format(tmp_path / "made") for each in INJECTED):
        for said, extraction in (
            (f"\\boxed{{{text}}}", "boxed"),
            (f"${text}$", "anywhere"),
            (f"Answer: {text} = 7/2", "anywhere"),
        ):
            assert not mathematics.grade(said, ["72"], extraction)
    mathematics.grade("\\boxed{2(3+4)^2/7.5}", ["13"])
    assert not list(tmp_path.iterdir()) and seen
    texts = [code if isinstance(code, str) else " ".join(code.co_names) for code in seen]
    names = {name for text in texts for name in re.findall(r"[A-Za-z_]\w*", text)}
    assert "Integer" in names and not names & set(re.findall(r"[A-Za-z_]\w+", " ".join(INJECTED))) - {"text", "max"}


def test_sets_are_read_by_name_from_files_and_from_the_hub(tmp_path, monkeypatch) -> None:
    gsm = [{"question": f"What is {i} + 1000?", "answer": f"Add.\n#### 1,{i:03}"} for i in range(2)]
    bench = [{"question": "Solve.", "final_answer": ["$2$", "3"]}]
    (tmp_path / "mathematics").mkdir()
    monkeypatch.setenv("EVOALIGN_DATA", str(tmp_path))
    for name, rows in {"gsm8k.train": gsm, "olympiadbench.test": bench}.items():
        (tmp_path / f"mathematics/{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(mathematics, "problems", mathematics.problems.__wrapped__)
    module, name = tasks.named("mathematics:gsm8k")
    rows = module.dataset(module.problems("train", *name))
    assert [each["role"] for each in rows[0]["prompt"]] == ["system", "user"] and json.loads(rows[1]["answer"]) == [
        "1001"
    ]
    (asked,) = module.dataset(module.problems("train", *name)[:1], prompt="boxed_user")[0]["prompt"]
    assert asked["content"].startswith("What is 0 + 1000?\nPlease") and asked["content"].endswith("\\boxed{}.")
    assert module.reward(["", ""], ["\\boxed{1001}"] * 2, [row["answer"] for row in rows]) == [0.0, 1.0]
    assert mathematics.problems("test", "olympiadbench")[0].answers == ("2", "3")
    hub = [{"problem": str(i), "answer": "1"} for i in range(600)]
    monkeypatch.setattr("datasets.load_dataset", lambda name, config, split: hub)
    sizes = {split: len(mathematics.problems(split, "math500")) for split in ("train", "validation", "test")}
    assert sizes == {"train": 100, "validation": 500, "test": 600}
    said = [[{"role": "assistant", "content": "\\boxed{}"}], "\\boxed{1}", "1"]
    assert mathematics.format_reward(said) == [0.0, 1.0, 0.0]


test_what_cannot_be_is_refused = refused(
    (lambda: mathematics.problems("train", "minerva"), "minerva has no split 'train', but test"),
    (lambda: mathematics.problems("test", "gsm8"), "Did you mean 'gsm8k'"),
    (lambda: tasks.named("mathematics:math50"), "Did you mean 'math500'"),
    (lambda: tasks.named("mathematics"), "say mathematics:NAME, with one of gsm8k, "),
    (lambda: tasks.named("countdown:gsm8k"), "countdown has one set of problems"),
    (lambda: mathematics.grade("", ["1"], "box"), "Did you mean 'boxed'"),
    (lambda: mathematics.dataset([], prompt="boxd"), "Did you mean 'boxed'"),
    (lambda: mathematics.dataset([mathematics.Problem("?", ("",))]), "1 to 1000 characters"),
    call=lambda make: make(),
)


def test_errors_name_the_remedy(monkeypatch) -> None:
    monkeypatch.delenv("EVOALIGN_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="Connect, or set EVOALIGN_DATA .* mathematics/minerva.test.jsonl"):
        monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: (_ for _ in ()).throw(ConnectionError("offline")))
        mathematics.problems.__wrapped__("test", "minerva")
    with pytest.raises(DataError, match="must be a text"):
        mathematics.reward([""], [""], [72])
