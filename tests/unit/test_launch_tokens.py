"""Token files: a round trip through the tokenizer, and a cache that is never stale and never half there."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from launch import tokens
from launch.corpus import TextSource
from launch.tokens import cache_key, open_tokens, prepare_tokens, train_tokenizer

TRAIN = [["the cat sat on the mat. ", "the dog sat on the log.\n"], ["another text, öäü ☃ \x00 end"]]
VAL = [["the cow sat on the plough"]]


def source(content: str = "1") -> TextSource:
    return TextSource("test", content, lambda: iter(TRAIN), lambda: iter(VAL))


def test_tokens_decode_to_the_text(tmp_path: Path) -> None:
    data = open_tokens(tmp_path, prepare_tokens(source(), 300, tmp_path))
    tokenizer = Tokenizer.from_file(str(tmp_path / data.meta["key"] / "tokenizer.json"))
    ids = data.train.tolist()
    starts = [i for i, t in enumerate(ids) if t == 0]
    assert len(starts) == len(TRAIN)
    assert starts[0] == 0
    assert tokenizer.decode(ids[1 : starts[1]]) == "".join(TRAIN[0])
    assert tokenizer.decode(ids[starts[1] + 1 :]) == TRAIN[1][0]
    assert tokenizer.decode(data.val.tolist()[1:]) == VAL[0][0]
    assert data.meta["train_bytes"] == sum(len(p.encode()) for d in TRAIN for p in d)
    assert data.meta["train_tokens"] == len(ids) < data.meta["train_bytes"]
    assert max(ids) < 300


def test_dtype_follows_the_vocabulary(tmp_path: Path) -> None:
    assert open_tokens(tmp_path, prepare_tokens(source(), 65536, tmp_path)).train.dtype == np.uint16
    assert open_tokens(tmp_path, prepare_tokens(source(), 65537, tmp_path)).train.dtype == np.uint32


def test_text_that_spells_the_end_token_is_ordinary_text() -> None:
    tokenizer = train_tokenizer(TRAIN, 300)
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    ids = tokenizer.encode("a<|endoftext|>b").ids
    assert 0 not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_cache_is_used_and_follows_text_and_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = prepare_tokens(source(), 300, tmp_path)
    assert prepare_tokens(source("2"), 300, tmp_path) != key
    assert prepare_tokens(source(), 301, tmp_path) != key
    monkeypatch.setattr(tokens, "_build", lambda *a: pytest.fail("built again"))
    assert prepare_tokens(source(), 300, tmp_path) == key == cache_key("1", 300)


def test_a_killed_build_leaves_nothing_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokens, "write_tokens", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare_tokens(source(), 300, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncate", "no meta", "half meta"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / prepare_tokens(source(), 300, tmp_path)
    if damage == "truncate":
        os.truncate(folder / "train.bin", 4)
    elif damage == "no meta":
        (folder / "meta.json").unlink()
    else:
        (folder / "meta.json").write_text('{"dtype": "uint16"')
    with pytest.raises(OSError, match="no token files"):
        open_tokens(tmp_path, folder.name)
    assert prepare_tokens(source(), 300, tmp_path) == folder.name
    assert len(open_tokens(tmp_path, folder.name).train) > 4


def test_another_node_that_is_faster_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two builders on a shared file system: the second finds the name taken and keeps what is there."""
    build = tokens._build

    def overtaken(folder: Path, src: TextSource, vocab: int, key: str) -> None:
        build(folder, src, vocab, key)
        (tmp_path / key).mkdir()
        build(tmp_path / key, src, vocab, key)
        (tmp_path / key / "first").touch()

    monkeypatch.setattr(tokens, "_build", overtaken)
    key = prepare_tokens(source(), 300, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [key]
    assert (tmp_path / key / "first").exists()


def test_same_text_same_tokenizer() -> None:
    a, b = (json.loads(train_tokenizer(TRAIN, 290).to_str()) for _ in range(2))
    assert a == b


def test_small_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--vocab-size 256: .* at least 257"):
        train_tokenizer(TRAIN, 256)
