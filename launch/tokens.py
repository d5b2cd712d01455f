"""Text to token files: a byte-level BPE trained on the training text, and memory-mapped token streams, both cached.

The cache is a folder named by the hash of (text, tokenizer settings), so that another text never meets an old one. It
is built beside its final name and renamed when complete: a killed build leaves nothing that a later start would read.

    CACHE/KEY/tokenizer.json  train.bin  val.bin  meta.json
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from launch.corpus import Document, TextSource
from launch.models import END_OF_TEXT_ID

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB = 257  # 256 bytes and the end of text
BPE_PIECES = 400  # of at most ~256 k characters each, so about 100 MB: enough for 50 k merges
ENCODE_PIECES = 16
FORMAT = 1


@dataclass(frozen=True)
class TokenData:
    """The two token streams of one cache folder, memory-mapped, and what is known of them."""

    train: NDArray[np.unsignedinteger]  # (N,)
    val: NDArray[np.unsignedinteger]  # (M,)
    meta: dict[str, Any]  # key, vocab, dtype, train_tokens, val_tokens, train_bytes, val_bytes


def cache_key(content_hash: str, vocab: int) -> str:
    """Name of the cache folder: everything that the token files depend on."""
    settings = {"content": content_hash, "vocab": vocab, "bpe_pieces": BPE_PIECES, "format": FORMAT}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:20]


def train_tokenizer(documents: Iterable[Document], vocab: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab` tokens; id 0 ends a text. Deterministic in the text and the size.

    Raises ValueError if `vocab` is too small for the 256 bytes and the end of text.
    """
    if vocab < MIN_VOCAB:
        raise ValueError(f"--vocab-size {vocab}: a byte-level tokenizer needs at least {MIN_VOCAB}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.encode_special_tokens = True  # a text that spells the end token does not end there
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pieces = (piece for document in documents for piece in document)
    tokenizer.train_from_iterator(islice(pieces, BPE_PIECES), trainer)
    return tokenizer


def _marked(documents: Iterable[Document]) -> Iterator[tuple[str, bool]]:
    """Every piece, and whether it starts a document."""
    for document in documents:
        for i, piece in enumerate(document):
            yield piece, i == 0


def write_tokens(path: Path, documents: Iterable[Document], tokenizer: Tokenizer, dtype: str) -> tuple[int, int]:
    """Encode to a flat little-endian file of `dtype`, id 0 before each document. Returns (tokens, bytes of UTF-8)."""
    pieces, tokens, size = _marked(documents), 0, 0
    with path.open("wb") as file:
        while batch := list(islice(pieces, ENCODE_PIECES)):
            for encoding, (piece, starts) in zip(
                tokenizer.encode_batch_fast([p for p, _ in batch], add_special_tokens=False), batch, strict=True
            ):
                ids = np.array([END_OF_TEXT_ID] * starts + encoding.ids, dtype=f"<{np.dtype(dtype).str[1:]}")
                ids.tofile(file)
                tokens += len(ids)
                size += len(piece.encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())
    return tokens, size


def _build(folder: Path, source: TextSource, vocab: int, key: str) -> None:
    """Fill an empty folder. meta.json comes last: it vouches for the rest."""
    dtype = "uint16" if vocab <= 1 << 16 else "uint32"
    tokenizer = train_tokenizer(source.train(), vocab)
    tokenizer.save(str(folder / "tokenizer.json"))
    train_tokens, train_bytes = write_tokens(folder / "train.bin", source.train(), tokenizer, dtype)
    val_tokens, val_bytes = write_tokens(folder / "val.bin", source.val(), tokenizer, dtype)
    meta = {
        "key": key,
        "source": source.name,
        "content_hash": source.content_hash,
        "vocab": vocab,
        "vocab_used": tokenizer.get_vocab_size(),
        "dtype": dtype,
        "train_tokens": train_tokens,
        "val_tokens": val_tokens,
        "train_bytes": train_bytes,
        "val_bytes": val_bytes,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


def _is_whole(folder: Path) -> bool:
    """Whether the cache folder is there and its files have the sizes that meta.json tells."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        width = np.dtype(meta["dtype"]).itemsize
        return all((folder / f"{s}.bin").stat().st_size == meta[f"{s}_tokens"] * width for s in ("train", "val"))
    except (OSError, ValueError, KeyError):
        return False


def prepare_tokens(source: TextSource, vocab: int, cache: Path) -> str:
    """Build the token files of `source` unless they are there already. Returns the key to open them with.

    To be called by one process a node. Nodes that share a file system may build at the same time: the first to finish
    is kept. Raises ValueError for a vocabulary that is too small, OSError if the cache can't be written.
    """
    key = cache_key(source.content_hash, vocab)
    final = cache / key
    if _is_whole(final):
        return key
    cache.mkdir(parents=True, exist_ok=True)
    building = cache / f".{key}.{os.uname().nodename}.{os.getpid()}"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        _build(building, source, vocab, key)
        if not _is_whole(final):  # something cut short by hand
            shutil.rmtree(final, ignore_errors=True)
        try:
            building.rename(final)
        except OSError:
            if not _is_whole(final):  # else another node was faster
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return key


def open_tokens(cache: Path, key: str) -> TokenData:
    """Memory-map the token files of `key`. Raises OSError if this node's cache does not have them."""
    folder = cache / key
    if not _is_whole(folder):
        raise OSError(f"--cache-dir {cache}: no token files {key} on this node, though the builder reported them")
    meta = json.loads((folder / "meta.json").read_text())
    train, val = (np.memmap(folder / f"{s}.bin", dtype=meta["dtype"], mode="r") for s in ("train", "val"))
    return TokenData(train, val, meta)
