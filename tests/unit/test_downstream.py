"""Downstream tasks: files, comparisons and checkpoints; with lm-eval installed, its scores of a tiny random model."""

from __future__ import annotations

import bz2
import json
import lzma
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evals.downstream import compare
from evals.downstream.__main__ import main, named, parse
from evals.downstream.checkpoints import find, load_model, load_tokenizer
from evals.downstream.harness import TaskResult
from evals.downstream.tasks import FILES, clean, prepare, read_items
from launch.models import build_model
from launch.tokens import train_tokenizer

WORDS = "the hill the river a boat a stone goes up goes down because it rains it shines"
CHOICES = [
    {"query": "Question: where does the boat go?", "choices": ["up the hill", "down the river"], "gold": 1},
    {"query": "Question: what goes up?", "choices": ["a stone", "a boat", "the river"], "gold": 0},
    {"query": "Question: a very long answer?", "choices": ["it rains " * 40, "it shines"], "gold": 0},
]
ITEMS: dict[str, list[dict[str, Any]]] = {
    "winogrande": [
        {"context_options": ["the boat", "the stone"], "continuation": "goes down the river.", "gold": 0},
        {"context_options": ["the hill", "the rain"], "continuation": "goes down.", "gold": 1},
    ],
    "lambada_openai": [
        {"context": "the boat goes down the", "continuation": "river"},
        {"context": "the stone goes up the", "continuation": "hill"},
    ],
}
HELLASWAG = "A boat: [header] it goes\n1\nup.\ndown.\na hill.\n[step] a stone.\nA stone: it\n0\na\nb\nc\nd\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Invented items of every task, in the files' own formats."""
    folder = tmp_path / "data"
    folder.mkdir()
    for task, stem in FILES.items():
        if task == "hellaswag":
            (folder / f"{stem}.txt.bz2").write_bytes(bz2.compress(HELLASWAG.encode()))
        else:
            lines = "".join(json.dumps(item) + "\n" for item in ITEMS.get(task, CHOICES))
            (folder / f"{stem}.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    return folder


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Exported weights of a random tiny model beside its tokenizer."""
    torch.manual_seed(0)
    model = build_model("tiny", vocab=300, seq=32)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    train_tokenizer([[WORDS]], 300).save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "pytorch_model.bin"


def flags(folder: Path) -> list[str]:
    model = ["--preset", "tiny", "--vocab-size", "300", "--seq-len", "32"]
    return [*model, "--tokenizer", str(folder / "tokenizer.json")]


def test_task_files_are_made_ready(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    prepare(data, list(FILES), out)
    assert {p.stem for p in out.glob("*.yaml")} == {p.stem for p in out.glob("*.jsonl")} == set(FILES)
    assert "@DATA@" not in "".join(p.read_text() for p in out.glob("*.yaml"))
    first, second = (json.loads(line) for line in (out / "hellaswag.jsonl").read_text().splitlines())
    assert first == {"query": "A boat: it goes", "choices": ["up.", "down.", "a hill.", " a stone."], "gold": 1}
    assert second["gold"] == 0
    assert clean("Roof. [title] Use it [step] now") == "Roof.. Use it now"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("piqa.jsonl", '{"query": "a"}\n', "line 1: expected a JSON object with query, choices, gold"),
        (
            "piqa.jsonl",
            '{"query": "a", "choices": ["b"], "gold": 1}\n',
            "gold is 1, expected an index of the 1 choices",
        ),
        ("piqa.jsonl", "no\n", "line 1: expected a JSON object"),
        ("piqa.jsonl.xz", "no", "can't be read"),
    ],
)
def test_bad_items_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        list(read_items(tmp_path / name, "piqa"))


def test_a_text_of_the_wrong_number_of_lines(tmp_path: Path) -> None:
    (tmp_path / "h.txt").write_text(HELLASWAG + "more\n")
    with pytest.raises(ValueError, match="line 13: expected six lines"):
        list(read_items(tmp_path / "h.txt", "hellaswag"))


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        prepare(tmp_path / "x", ["piqa"], tmp_path)
    with pytest.raises(ValueError, match="no file for copa"):
        prepare(tmp_path, ["copa"], tmp_path)
    (tmp_path / "copa.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no items"):
        prepare(tmp_path, ["copa"], tmp_path)


def result(correct: list[float], loglikelihood: list[float]) -> TaskResult:
    return TaskResult({"acc": float(np.mean(correct))}, np.array(correct), np.array(loglikelihood), 0.0)


def test_errors_and_paired_differences() -> None:
    base, ours = result([1, 0, 0, 1], [-1, -2, -3, -4]), result([1, 1, 0, 1], [-1.5, -1, -2, -3.5])
    mean, error = compare.mean_and_error(base.correct)
    assert mean == 0.5 and error == pytest.approx(math.sqrt(1 / 3) / 2)
    difference, error = compare.difference(ours, base, "loglikelihood")
    steps = np.array([-0.5, 1, 1, 0.5])
    assert difference == 0.5 and error == pytest.approx(steps.std(ddof=1) / 2)
    assert compare.over_tasks([(1, 3), (2, 4)]) == (1.5, 2.5)
    with pytest.raises(ValueError, match="4 and 1 items"):
        compare.difference(base, result([1], [-1]), "correct")
    shown = compare.markdown({"a": {"t": base}, "b": {"t": ours}})
    assert "+25.0 ± 25.0" in shown and "+0.500 ± 0.354" in shown
    assert "Differences" not in compare.markdown({"a": {"t": base}})


def test_what_is_no_checkpoint_is_named(tmp_path: Path, weights: Path) -> None:
    def refused(path: Path, message: str, *more: str) -> None:
        with pytest.raises(ValueError, match=message):
            find(path, parse([str(path), *more]))

    refused(tmp_path / "gone", "no such checkpoint")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "neither a checkpoint of launch/pretrain.py")
    (empty / "latest").write_text("step5")
    refused(empty, "names step5, which has no mp_rank_00_model_states.pt")
    refused(weights, "of which model")
    refused(weights, "its tokenizer is not at", "--preset", "tiny", "--cache-dir", str(tmp_path))


def test_weights_of_another_model_are_refused(weights: Path) -> None:
    args = parse([str(weights), *flags(weights.parent)])
    args.preset = "small"
    with pytest.raises(ValueError, match="not a small"):
        load_model(find(weights, args))
    state = torch.load(weights)
    state.pop("transformer.ln_f.weight")
    torch.save(state, weights)
    with pytest.raises(ValueError, match="missing .'transformer.ln_f.weight'"):
        load_model(find(weights, parse([str(weights), *flags(weights.parent)])))


def test_exported_weights_come_back(weights: Path) -> None:
    checkpoint = find(weights, parse([str(weights), *flags(weights.parent)]))
    torch.manual_seed(0)
    same = build_model("tiny", vocab=300, seq=32).state_dict()
    model = load_model(checkpoint)
    assert all(torch.equal(same[name], value) for name, value in model.state_dict().items())
    state = torch.load(weights)
    torch.save({f"module.{n}": v for n, v in state.items() if n != "lm_head.weight"}, weights)  # tied, and once only
    again = load_model(checkpoint).state_dict()
    assert torch.equal(again["lm_head.weight"], same["lm_head.weight"])
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.decode(tokenizer("the boat")["input_ids"]) == "the boat"
    assert list(named([checkpoint, checkpoint])) == [checkpoint.name, f"{checkpoint.name} #2"]


def test_without_lm_eval_the_command_says_what_to_install(
    weights: Path, monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install"):
        main([str(weights), "--data", str(data)])


needs_lm_eval = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("lm_eval"),
    reason="lm-eval brings 380 MB, so it is in the extra `eval`, not in `test`; pip install '.[eval]'",
)


def by_hand(weights: Path, context: str, answer: str) -> float:
    """Log-likelihood of an answer that fits the window, in one forward pass of our own."""
    checkpoint = find(weights, parse([str(weights), *flags(weights.parent)]))
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    whole, prompt = (tokenizer(text)["input_ids"] for text in (context + answer, context))
    count = len(whole) - len(prompt)
    shown = torch.tensor([whole[-(checkpoint.seq + 1) :]])
    logp = model(input_ids=shown[:, :-1]).logits[0].log_softmax(-1)
    return float(logp.gather(1, shown[0, 1:, None])[-count:].sum().detach())


@needs_lm_eval
def test_lm_eval_scores_a_checkpoint(weights: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    main([str(weights), str(weights), "--data", str(data), *flags(weights.parent), "-o", str(out), "--batch-size", "2"])
    told = json.loads((out / "downstream.json").read_text())["results"]
    first, second = told.values()
    assert list(first) == list(FILES) and first == second
    for task in FILES:
        assert first[task]["harness"]["acc"] == pytest.approx(first[task]["accuracy"][0]), task
    want = [by_hand(weights, "the boat", " goes down the river."), by_hand(weights, "the rain", " goes down.")]
    assert first["winogrande"]["loglikelihood"][0] == pytest.approx(np.mean(want), rel=1e-4)
    want = [by_hand(weights, i["context"], " " + i["continuation"]) for i in ITEMS["lambada_openai"]]
    assert first["lambada_openai"]["loglikelihood"][0] == pytest.approx(np.mean(want), rel=1e-4)
    assert first["lambada_openai"]["harness"]["perplexity"] == pytest.approx(math.exp(-np.mean(want)), rel=1e-3)
    assert 0 < first["arc_easy"]["context_cut"] < 1
    shown = (out / "downstream.md").read_text()
    assert "acc_norm" in shown and "+0.0 ± 0.0" in shown


@needs_lm_eval
def test_an_answer_longer_than_the_window_is_scored_in_pieces() -> None:
    from evals.downstream.windows import cut

    assert cut(("key", [1, 2], [3] * 8), 8) == [("key", [1, 2], [3] * 8)]
    answer = list(range(100, 119))
    pieces = cut(("key", [1, 2], answer), 8)
    assert [len(p[2]) for p in pieces] == [4, 4, 4, 4, 3]
    assert [t for p in pieces for t in p[2]] == answer
    assert pieces[2] == (None, [1, 2, *answer[:8]], answer[8:12])
