"""Text through `datasets`: the real loading code on a small local data set in the Hub's format."""

import json
from pathlib import Path

import pytest

from launch.corpus import TextSource
from launch.hub import from_hub
from launch.tokens import open_tokens, prepare_tokens

pytest.importorskip("datasets")


def write_rows(path: Path, kind: str, texts: list[str], column: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "jsonl":
        path.write_text("".join(json.dumps({column: t, "meta": i}) + "\n" for i, t in enumerate(texts)))
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({column: texts, "meta": list(range(len(texts)))}), path)


def texts(source: TextSource) -> tuple[list[str], list[str]]:
    return ["".join(d) for d in source.train()], ["".join(d) for d in source.val()]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_every_twentieth_document_is_held_out(tmp_path: Path, kind: str) -> None:
    documents = [f"document {i}" for i in range(60)]
    write_rows(tmp_path / "data" / f"train-0.{kind}", kind, documents[:30])
    write_rows(tmp_path / "data" / f"train-1.{kind}", kind, documents[30:])
    train, val = texts(from_hub(f"hf:{tmp_path}", None))
    assert val == [documents[19], documents[39], documents[59]]
    assert train == [d for d in documents if d not in val]


def test_own_validation_split_is_used(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.parquet", "parquet", ["a", "b", "c"])
    write_rows(tmp_path / "validation.parquet", "parquet", ["v"])
    assert texts(from_hub(f"hf:{tmp_path}", 2)) == (["a", "b"], ["v"])


def test_hash_follows_content_and_limit(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", "jsonl", ["a", "b"])
    first = from_hub(f"hf:{tmp_path}", None).content_hash
    assert from_hub(f"hf:{tmp_path}", None).content_hash == first
    assert from_hub(f"hf:{tmp_path}", 1).content_hash != first
    write_rows(tmp_path / "train.jsonl", "jsonl", ["a", "c"])
    assert from_hub(f"hf:{tmp_path}", None).content_hash != first


def test_into_token_files(tmp_path: Path) -> None:
    write_rows(tmp_path / "set" / "train.parquet", "parquet", [f"some words {i}" for i in range(40)])
    source = from_hub(f"hf:{tmp_path / 'set'}", None)
    data = open_tokens(tmp_path / "cache", prepare_tokens(source, 270, tmp_path / "cache"))
    assert (data.train == 0).sum() == 38
    assert (data.val == 0).sum() == 2


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"found neither"):
        from_hub(f"hf:{tmp_path}", None)
    write_rows(tmp_path / "train.jsonl", "jsonl", ["a"], column="content")
    with pytest.raises(ValueError, match="no 'text' column"):
        from_hub(f"hf:{tmp_path}", None)
    write_rows(tmp_path / "more.parquet", "parquet", ["a"])
    with pytest.raises(ValueError, match=r"found both"):
        from_hub(f"hf:{tmp_path}", None)


def test_hub_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    with pytest.raises(ValueError, match=r"--data openwebtext: Skylion007/openwebtext could not be loaded .*hf:FOLDER"):
        from_hub("openwebtext", None)
