"""The folder of a checkpoint: whole or not there, whatever is interrupted; and every flipped bit is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_scape import manifest, universal
from deepspeed_scape.manifest import ScapeCheckpointError

FILES = {"a.pt": b"first file", "zero/b.pt": b"second\x00file"}


def make(folder: Path, mark: bytes = b"") -> Path:
    """A sealed folder."""
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content + mark)
    manifest.write(folder, {"step": 3}, {name: manifest.describe_file(folder / name) for name in FILES})
    return folder


def mark_of(folder: Path) -> bytes:
    listed = manifest.read(folder)
    assert manifest.find_damage(folder, listed["files"], listed["files"]) is None
    return (folder / "a.pt").read_bytes()[len(FILES["a.pt"]) :]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    listed = manifest.read(make(tmp_path / "one"))
    assert listed["step"] == 3 and sorted(listed["files"]) == sorted(FILES)
    assert listed["files"]["a.pt"]["bytes"] == len(FILES["a.pt"])


@pytest.mark.parametrize("older", [False, True], ids=["new", "over-an-older-one"])
def test_publish(tmp_path: Path, older: bool) -> None:
    final = tmp_path / "one"
    if older:
        make(final, b"old")
    make(manifest.draft_of(final), b"new")
    manifest.publish(final)
    assert mark_of(final) == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("at", range(4))
def test_publish_interrupted_at_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Stopped before the at-th rename or removal, what can be loaded is the old folder or the new one, whole."""
    final = make(tmp_path / "one", b"old")
    make(manifest.draft_of(final), b"new")
    calls = iter(range(100))

    def stop_at(real):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            if next(calls) == at:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", stop_at(Path.rename))
        patch.setattr(manifest.shutil, "rmtree", stop_at(manifest.shutil.rmtree))
        manifest.publish(final)
    manifest.recover(final)
    assert mark_of(final) == (b"new" if at == 3 else b"old")
    if not manifest.draft_of(final).exists():
        make(manifest.draft_of(final), b"next")
    manifest.publish(final)  # and the next save is not in the way of what is left
    assert mark_of(final) in (b"new", b"next")


def test_every_flipped_bit_of_the_manifest_is_found(tmp_path: Path) -> None:
    folder = make(tmp_path / "one")
    path = folder / manifest.NAME
    whole = path.read_bytes()
    before = json.loads(whole)
    for place in range(len(whole)):
        for bit in range(8):
            broken = bytearray(whole)
            broken[place] ^= 1 << bit
            path.write_bytes(broken)
            try:
                assert manifest.read(folder) == {key: value for key, value in before.items() if key != "checksum"}
            except ScapeCheckpointError as error:
                assert manifest.NAME in str(error) and "Remedy" in str(error)


@given(place=st.integers(0, 9), bit=st.integers(0, 7))
def test_every_flipped_bit_of_a_file_is_found(tmp_path_factory: pytest.TempPathFactory, place: int, bit: int) -> None:
    folder = make(tmp_path_factory.mktemp("flip") / "one")
    raw = bytearray(FILES["a.pt"])
    raw[place] ^= 1 << bit
    (folder / "a.pt").write_bytes(raw)
    files = manifest.read(folder)["files"]
    assert "a.pt is damaged: its SHA-256" in str(manifest.find_damage(folder, files, files))


def test_missing_truncated_and_unreadable_files_are_named(tmp_path: Path) -> None:
    folder = make(tmp_path / "one")
    files = manifest.read(folder)["files"]
    (folder / "a.pt").write_bytes(b"short")
    assert "a.pt is damaged: it has 5 bytes, the manifest says 10" in str(manifest.find_damage(folder, files, ["a.pt"]))
    (folder / "a.pt").unlink()
    assert "a.pt is damaged: it is missing" in str(manifest.find_damage(folder, files, ["a.pt"]))
    (folder / "a.pt").mkdir()
    assert "a.pt is damaged" in str(manifest.find_damage(folder, files, ["a.pt"]))


def test_why_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert "there is no other in this folder" in manifest.explain_missing(tmp_path / "two")
    make(tmp_path / "one")
    assert manifest.explain_missing(tmp_path / "two").endswith("Remedy: load another tag: one")
    manifest.draft_of(tmp_path / "two").mkdir()
    assert "was not finished" in manifest.explain_missing(tmp_path / "two")


def test_the_folder_of_one_tag_is_not_taken_for_a_run_that_begins(tmp_path: Path) -> None:
    make(tmp_path / "one")
    for name, wanted in (("latest", False), ("latest_universal", True)):
        said = manifest.explain_tagless(tmp_path / "one" / name, wanted)
        assert said is not None and said.endswith(f"one is one checkpoint. Remedy: give load_checkpoint the folder "
                                                  f"around it, {tmp_path}")  # fmt: skip
    assert manifest.explain_tagless(tmp_path / "latest", False) is None
    assert "there is no" in str(manifest.explain_tagless(tmp_path / "latest_universal", True))


def test_a_folder_of_all_tags_is_told_from_the_folder_of_one(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("step60\n")
    with pytest.raises(ScapeCheckpointError, match="is a folder of checkpoints. .* the latest is .*step60$"):
        universal.convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
