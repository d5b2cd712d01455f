"""The local task files, made ready for lm-eval: plain JSON lines, and the task folder that points at them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

FOLDER = Path(__file__).resolve().parents[1] / "tasks"

FILES = {  # lm-eval's name of a task, and the stem of its file
    "piqa": "piqa",
    "hellaswag": "hellaswag_val_full",
    "arc_easy": "arc_easy",
    "arc_challenge": "arc_challenge",
    "openbookqa": "openbook_qa",
    "boolq": "boolq",
    "copa": "copa",
    "winogrande": "winogrande",
    "lambada_openai": "lambada_openai",
}
CHOICE_FIELDS = ("query", "choices", "gold")
FIELDS = {"winogrande": ("context_options", "continuation", "gold"), "lambada_openai": ("context", "continuation")}
OPENERS: dict[str, Callable[..., IO[Any]]] = {".xz": lzma.open, ".bz2": bz2.open, ".gz": gzip.open, "": open}
ENDINGS = 4  # of a HellaSwag item

Item = dict[str, Any]


def find_file(data: Path, task: str) -> Path:
    """The file of `task` in the folder. Raises ValueError if there is none."""
    names = [f"{FILES[task]}{kind}{packed}" for kind in (".jsonl", ".txt") for packed in OPENERS]
    for name in names:
        if (data / name).is_file():
            return data / name
    raise ValueError(
        f"--data {data}: no file for {task} (looked for {', '.join(names)}); --tasks takes a choice of tasks"
    )


def read_items(path: Path, task: str) -> Iterator[Item]:
    """Every item of a task file. Raises ValueError, with the line, for one that does not have the task's fields."""
    suffix = path.suffix if path.suffix in OPENERS else ""
    try:
        with OPENERS[suffix](path, "rt", encoding="utf-8") as file:
            yield from _six_lines(file, path) if ".txt" in path.name else _json_lines(file, path, task)
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: can't be read: {error}") from None


def _json_lines(file: IO[str], path: Path, task: str) -> Iterator[Item]:
    wanted = FIELDS.get(task, CHOICE_FIELDS)
    for number, line in enumerate(file, 1):
        try:
            item = json.loads(line)
            kept = {field: item[field] for field in wanted}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: expected a JSON object with {', '.join(wanted)}") from None
        _check_gold(kept, f"{path}, line {number}")
        yield kept


def _six_lines(file: IO[str], path: Path) -> Iterator[Item]:
    """HellaSwag as a text: context, index of the right ending, four endings."""
    lines = file.read().splitlines()
    for start in range(0, len(lines), 2 + ENDINGS):
        block = lines[start : start + 2 + ENDINGS]
        if len(block) != 2 + ENDINGS or not block[1].isdigit():
            raise ValueError(f"{path}, line {start + 1}: expected six lines: context, index, {ENDINGS} endings")
        context, gold, *endings = block
        item = {"query": clean(context), "choices": [clean(e) for e in endings], "gold": int(gold)}
        _check_gold(item, f"{path}, line {start + 1}")
        yield item


def _check_gold(item: Item, where: str) -> None:
    options = item.get("choices", item.get("context_options"))
    if options is not None and not (isinstance(item["gold"], int) and 0 <= item["gold"] < len(options)):
        raise ValueError(f"{where}: gold is {item['gold']!r}, expected an index of the {len(options)} choices")


def clean(text: str) -> str:
    """HellaSwag's WikiHow marks taken out, as lm-eval's task does: " [title]" ends a sentence, others vanish."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def prepare(data: Path, tasks: list[str], folder: Path) -> None:
    """Write the JSON lines and the task files of `tasks` into `folder`. Raises ValueError for what can't be used."""
    if not data.is_dir():
        raise ValueError(f"--data {data}: no such folder; evals/tasks/README.md tells which files it should hold")
    for task in tasks:
        items = [json.dumps(item) for item in read_items(find_file(data, task), task)]
        if not items:
            raise ValueError(f"{find_file(data, task)}: holds no items")
        (folder / f"{task}.jsonl").write_text("\n".join(items) + "\n")
        (folder / f"{task}.yaml").write_text((FOLDER / f"{task}.yaml").read_text().replace("@DATA@", str(folder)))
