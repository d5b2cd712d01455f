"""Text through the `datasets` library: OpenWebText, SlimPajama-6B, or a local folder in the same format.

Documents are streamed once, into the token cache; nothing but the tokens stays on disk. The validation text is the
data set's own validation split if it has one, else every 20th document.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from launch.corpus import Document, TextSource

HUB_SOURCES = {"openwebtext": "Skylion007/openwebtext", "slimpajama-6b": "DKYoon/SlimPajama-6B"}
LOCAL_PREFIX = "hf:"
HELD_OUT_EVERY = 20
VAL_MAX_DOCUMENTS = 5000
_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}


def is_hub_source(entry: str) -> bool:
    return entry in HUB_SOURCES or entry.startswith(LOCAL_PREFIX)


def _load_local(folder: Path) -> tuple[dict[str, Any], str]:
    """Streaming splits of a folder of .parquet or .jsonl files, and the hash of their bytes.

    A file belongs to the validation split if its path below the folder has "val" in it, as on the Hub.
    """
    from datasets import load_dataset

    files = sorted(p for p in folder.rglob("*") if p.suffix in _FORMATS) if folder.is_dir() else []
    kinds = {_FORMATS[p.suffix] for p in files}
    if len(kinds) != 1:
        raise ValueError(
            f"--data {LOCAL_PREFIX}{folder}: expected a folder of .parquet files or of .jsonl files; "
            f"found {'both' if kinds else 'neither'}"
        )
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    by_split: dict[str, list[str]] = {}
    for path in files:
        split = "validation" if "val" in str(path.relative_to(folder)).lower() else "train"
        by_split.setdefault(split, []).append(str(path))
    return dict(load_dataset(kinds.pop(), data_files=by_split, streaming=True)), digest.hexdigest()


def _load_hub(entry: str) -> tuple[dict[str, Any], str]:
    """Streaming splits of a data set on the Hub, and a hash of its name and revision."""
    from datasets import load_dataset, load_dataset_builder

    path = HUB_SOURCES[entry]
    try:
        revision = load_dataset_builder(path).hash  # the commit, for data sets without a script
        return dict(load_dataset(path, streaming=True)), hashlib.sha256(f"{path} {revision}".encode()).hexdigest()
    except (OSError, ConnectionError) as error:  # what `datasets` raises when the Hub is out of reach
        raise ValueError(
            f"--data {entry}: {path} could not be loaded ({type(error).__name__}: {error}); with no network, "
            f"download its parquet files elsewhere and give --data {LOCAL_PREFIX}FOLDER"
        ) from error


def _texts(split: Any, limit: int | None, *, held_out: bool | None) -> Iterator[Document]:
    """The `text` column of a split's first `limit` rows; `held_out` picks every 20th row, the others, or (None) all."""
    for i, row in enumerate(islice(split, limit)):
        if held_out is None or (i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out:
            yield (row["text"],)


def from_hub(entry: str, max_documents: int | None) -> TextSource:
    """The source that `--data openwebtext`, `--data slimpajama-6b` or `--data hf:FOLDER` names.

    `max_documents` bounds what is read of the training split. Raises ValueError if `datasets` is missing, the data set
    can't be loaded, or it has no `text` column.
    """
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"--data {entry}: needs the package datasets; pip install datasets")
    local = entry.startswith(LOCAL_PREFIX)
    splits, content = _load_local(Path(entry.removeprefix(LOCAL_PREFIX))) if local else _load_hub(entry)
    train, val = splits.get("train"), splits.get("validation")
    if train is None:
        raise ValueError(f"--data {entry}: has the splits {sorted(splits)}, but no training split")
    if "text" not in next(iter(train), {}):
        raise ValueError(f"--data {entry}: its rows have no 'text' column; rename the one that holds the documents")
    content_hash = hashlib.sha256(f"{content} {max_documents} {VAL_MAX_DOCUMENTS} {HELD_OUT_EVERY}".encode())
    if val is None:
        return TextSource(
            entry,
            content_hash.hexdigest(),
            lambda: _texts(train, max_documents, held_out=False),
            lambda: _texts(train, max_documents, held_out=True),
        )
    return TextSource(
        entry,
        content_hash.hexdigest(),
        lambda: _texts(train, max_documents, held_out=None),
        lambda: _texts(val, VAL_MAX_DOCUMENTS, held_out=None),
    )
