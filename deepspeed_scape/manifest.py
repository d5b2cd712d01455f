"""A checkpoint folder that is whole or not there: the manifest, and how a folder is put in its place.

A save writes into ``.TAG.saving`` beside the folder TAG. When every rank has written, ``scape_manifest.json`` lists
every file with its size and SHA-256, and only then is the folder renamed to TAG. A save that is killed leaves no TAG,
or the TAG that was there before. Nothing here talks to other ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NAME = "scape_manifest.json"
FORMAT = 1
_PIECE = 1 << 22  # bytes


class ScapeCheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or cannot be resumed as it is. The message says what to do."""


def draft_of(folder: Path) -> Path:
    """Where a save writes before the folder is whole."""
    return folder.with_name(f".{folder.name}.saving")


def replaced_of(folder: Path) -> Path:
    """Where an older checkpoint of the same tag stands, for the moment in which the new one takes its place."""
    return folder.with_name(f".{folder.name}.replaced")


def describe_file(path: Path, sync: bool = False) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file; ``sync`` forces it to the disk first."""
    sha, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())  # else a power cut could leave a renamed folder with empty files
        while piece := file.read(_PIECE):
            sha.update(piece)
            size += len(piece)
    return {"bytes": size, "sha256": sha.hexdigest()}


def write(folder: Path, meta: dict[str, Any], files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest of ``folder``: plain values ``meta``, and ``files`` by their path within the folder."""
    content = {"format": FORMAT, **meta, "files": dict(sorted(files.items()))}
    write_text(folder / NAME, json.dumps({**content, "checksum": _checksum(content)}, indent=1))


def write_text(path: Path, text: str) -> None:
    """Replace a small file, whole or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    with open(draft, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    _sync_folder(path.parent)


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder.

    Raises:
        ScapeCheckpointError: there is none, it is damaged, or its format is newer.
    """
    path = folder / NAME
    try:
        content = json.loads(path.read_bytes())
        checksum = content.pop("checksum")
    except FileNotFoundError:
        if (latest := folder / "latest").is_file():
            tag = folder / latest.read_text(errors="replace").strip()
            raise ScapeCheckpointError(
                f"{folder} is a folder of checkpoints. Remedy: name one, the latest is {tag}"
            ) from None
        raise ScapeCheckpointError(
            f"{folder} has no {NAME}: it was not written by SCAPE, or it was not copied whole. Remedy: "
            "load_checkpoint(..., load_optimizer_states=False) takes its weights and starts SCAPE afresh"
        ) from None
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ScapeCheckpointError(_damaged(path, "it cannot be read as JSON")) from None
    if checksum != _checksum(content):
        raise ScapeCheckpointError(_damaged(path, "its checksum is wrong"))
    if content["format"] != FORMAT:
        raise ScapeCheckpointError(
            f"{path}: format {content['format']}, this deepspeed_scape reads {FORMAT}. Remedy: install the "
            f"deepspeed_scape that wrote it, {content.get('deepspeed_scape')}"
        )
    return content


def find_damage(folder: Path, files: dict[str, dict[str, Any]], names: Iterable[str]) -> str | None:
    """What is wrong with the first bad one of ``names`` among the manifest's ``files``; None if all are as written."""
    for name in names:
        path, wanted = folder / name, files[name]
        try:
            size = path.stat().st_size
            if size != wanted["bytes"]:
                return _damaged(path, f"it has {size:,} bytes, the manifest says {wanted['bytes']:,}")
            if describe_file(path)["sha256"] != wanted["sha256"]:
                return _damaged(path, "its SHA-256 is not the manifest's")
        except FileNotFoundError:
            return _damaged(path, "it is missing")
        except OSError as error:
            return _damaged(path, f"it cannot be read ({error})")
    return None


def _damaged(path: Path, how: str) -> str:
    return f"{path} is damaged: {how}. Remedy: copy the checkpoint again, or load another tag"


def publish(folder: Path) -> None:
    """Put the finished draft in the place of ``folder``; an older checkpoint of that name goes only then."""
    old = replaced_of(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    draft_of(folder).rename(folder)
    _sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Bring back the older checkpoint of this name, if a save was killed between the two renames of :func:`publish`."""
    if not folder.exists() and replaced_of(folder).exists():
        replaced_of(folder).rename(folder)


def explain_tagless(latest: Path, universal: bool) -> str | None:
    """Why a folder without the file ``latest`` cannot be resumed; None where a run that saves there may begin."""
    folder = latest.parent
    if (folder / NAME).exists():  # it would begin from nothing, without a word
        return f"{folder} is one checkpoint. Remedy: give load_checkpoint the folder around it, {folder.parent}"
    if universal:
        return f"there is no {latest}. Remedy: name a tag, or convert one with python -m deepspeed_scape.universal"
    return None


def explain_missing(folder: Path) -> str:
    """Why there is no checkpoint ``folder``, and which there are."""
    there = sorted(path.parent.name for path in folder.parent.glob(f"[!.]*/{NAME}"))
    others = f"load another tag: {', '.join(there)}" if there else "there is no other in this folder"
    if draft_of(folder).exists():
        return f"the save of checkpoint {folder} was not finished, so it holds nothing to resume. Remedy: {others}"
    return f"there is no checkpoint {folder}. Remedy: {others}"


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network file systems know no sync of a folder
        pass
    finally:
        os.close(handle)
