"""``engine.save_checkpoint`` and ``engine.load_checkpoint`` around DeepSpeed's own: whole or not at all, on all ranks.

A save writes a draft folder, agrees that every rank has written, seals it with a manifest and renames it (see
``manifest.py``); ``latest`` follows. A load compares the files with the manifest, and the manifest with the run, before
DeepSpeed unpickles or changes anything.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger

from deepspeed_scape import checkpoint, manifest
from deepspeed_scape.agreement import all_or_none, gather, raise_together
from deepspeed_scape.faults import patient
from deepspeed_scape.manifest import ScapeCheckpointError


class _Recorder:
    """DeepSpeed's checkpoint engine, noting what it writes. A failure waits until all ranks can hear of it.

    Raised at once it would leave the other ranks in DeepSpeed's next barrier.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.written: list[Path] = []
        self.problem: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._try(path, lambda: self._inner.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        self._try(path, lambda: self._inner.save(state_dict, path))
        self.written.append(Path(path))

    def guard(self, write: Callable[[str], Any]) -> Callable[[str], None]:
        """``write``, failing as quietly as a save does."""
        return lambda path: self._try(path, lambda: write(path))

    def _try(self, path: str, write: Callable[[], Any]) -> None:
        try:
            write()
        except Exception as error:
            self.problem = self.problem or f"cannot write {path}: {error}{_room(path)}"


def save_checkpoint(
    stock: Callable[..., Any],
    engine: Any,
    save_dir: str,
    tag: Any = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Any:
    """DeepSpeed's save, atomic. All ranks must call it.

    Raises:
        ScapeCheckpointError: a rank cannot write, or the ranks name different tags; nothing is left of the new
            checkpoint, and the one before is as it was. All ranks raise.
    """
    with _together(engine, "save_checkpoint"):
        return _save(stock, engine, save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)


def _together(engine: Any, what: str) -> contextlib.ExitStack:
    """Time for ranks that have more to write or read, and one error when a rank is lost meanwhile."""
    stack = contextlib.ExitStack()
    stack.enter_context(engine.optimizer.roster.watch(what))
    stack.enter_context(patient(engine.optimizer.options.timeout, engine.optimizer.dp_process_group))
    return stack


def _save(
    stock: Callable[..., Any],
    engine: Any,
    save_dir: str,
    tag: Any,
    client_state: dict[str, Any],
    save_latest: bool,
    exclude_frozen_parameters: bool,
) -> Any:
    group = engine.optimizer.dp_process_group
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    if len(tags := set(gather(tag, group))) > 1:
        raise ScapeCheckpointError(
            f"the ranks save different tags: {', '.join(sorted(tags))}. Remedy: give all the same"
        )
    folder = Path(save_dir, tag)
    draft, writer = manifest.draft_of(folder), _is_writer(engine)
    if writer:  # before DeepSpeed's first barrier, after which ranks write
        shutil.rmtree(draft, ignore_errors=True)
    inner, recorder = engine.checkpoint_engine, _Recorder(engine.checkpoint_engine)
    engine.checkpoint_engine = recorder
    engine._copy_recovery_script = recorder.guard(engine._copy_recovery_script)  # on rank 0 only
    try:
        draft_tag = str(draft.relative_to(save_dir))
        done = stock(engine, save_dir, draft_tag, client_state, False, exclude_frozen_parameters)
        raise_together(recorder.problem, group)
        _seal(engine, draft, recorder.written, writer)
        with all_or_none(group):
            if writer:
                manifest.publish(folder)
                if save_latest:
                    manifest.write_text(Path(save_dir, "latest"), tag)
    except Exception as error:
        if writer:
            shutil.rmtree(draft, ignore_errors=True)  # of no use, and its room may be what was missing
        if isinstance(error, ScapeCheckpointError):  # agreed, so all ranks are here: none goes on before it is gone
            gather(None, group)
        raise
    finally:
        engine.checkpoint_engine = inner
        del engine._copy_recovery_script
    return done


def _seal(engine: Any, draft: Path, written: list[Path], writer: bool) -> None:
    """Write the manifest of what all ranks have written."""
    group = engine.optimizer.dp_process_group
    files: dict[str, Any] = {}
    with all_or_none(group):
        # a checkpoint engine may write in the name of another rank
        files = {str(p.relative_to(draft)): manifest.describe_file(p, sync=True) for p in written if p.exists()}
    everyone: dict[str, Any] = {}
    for part in gather(files, group):
        everyone.update(part)
    with all_or_none(group):
        if writer:
            there = {name: entry for name, entry in everyone.items() if (draft / name).exists()}  # node-local storage
            manifest.write(draft, {**_versions(engine), **checkpoint.describe(engine.optimizer)}, there)


def _versions(engine: Any) -> dict[str, Any]:
    import deepspeed_scape

    found = {"deepspeed_scape": deepspeed_scape.__version__, "deepspeed": deepspeed.__version__}
    return {**found, "torch": torch.__version__, "bf16": bool(engine.bfloat16_enabled())}


def _is_writer(engine: Any) -> bool:
    """The rank that names folders: rank 0, or the first of each node where every node has a disk of its own."""
    return (engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0


def _room(path: str) -> str:
    try:
        return f" ({shutil.disk_usage(os.path.dirname(path)).free:,} bytes free)"
    except OSError:
        return ""


def load_checkpoint(
    stock: Callable[..., Any],
    engine: Any,
    load_dir: str,
    tag: Any = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
) -> Any:
    """DeepSpeed's load, of a checkpoint that is whole and fits. All ranks must call it.

    Raises:
        ScapeCheckpointError: names the file or setting and the remedy, on all ranks; nothing has changed.
    """
    with _together(engine, "load_checkpoint"):
        chosen = _choose(engine, load_dir, tag, load_module_only or not load_optimizer_states)
        if chosen is None:
            return stock(engine, load_dir)  # a warning and (None, None): the start of a run that saves there
        if engine.load_universal_checkpoint():
            _load_frozen(engine, load_dir, chosen, load_module_strict, custom_load_fn)
        return stock(
            engine, load_dir, chosen, load_module_strict, load_optimizer_states, load_lr_scheduler_states,
            load_module_only, custom_load_fn,
        )  # fmt: skip


def refuse_ours(stock: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """DeepSpeed's load for another optimizer, which would take SCAPE's moments for its own without a word.

    Raises:
        ScapeCheckpointError: the checkpoint is SCAPE's, and more than its weights is asked for.
    """
    call = inspect.signature(stock).bind(engine, *args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    latest = Path(given["load_dir"], "latest_universal" if engine.load_universal_checkpoint() else "latest")
    tag = _wanted_tag(given["tag"], latest)
    if tag is not None and engine.optimizer is not None:
        folder, all_of_it = latest.parent / tag, given["load_optimizer_states"] and not given["load_module_only"]
        if all_of_it and (folder / manifest.NAME).exists():
            raise ScapeCheckpointError(
                f"{folder} was written by SCAPE, whose moments mean something else to another optimizer. Remedy: "
                "load_checkpoint(..., load_optimizer_states=False) takes its weights"
            )
    return stock(engine, *args, **kwargs)


def _choose(engine: Any, load_dir: str, tag: Any, weights_only: bool) -> str | None:
    """The tag to load, the same and good on all ranks; None if there is no ``latest`` yet."""
    group = engine.optimizer.dp_process_group
    universal = engine.load_universal_checkpoint()
    latest = Path(load_dir, "latest_universal" if universal else "latest")
    wanted = gather(_wanted_tag(tag, latest), group)
    if len(set(wanted)) > 1:
        raise ScapeCheckpointError(f"the ranks would load different tags: {wanted}. Remedy: give all the same tag")
    if wanted[0] is None:
        with all_or_none(group):
            if problem := manifest.explain_tagless(latest, universal):
                raise ScapeCheckpointError(problem)
        return None
    folder = Path(load_dir, wanted[0])
    with all_or_none(group):
        if _is_writer(engine):
            manifest.recover(folder)
    with all_or_none(group):
        _inspect(engine, folder, weights_only)
    return wanted[0]


def _wanted_tag(tag: Any, latest: Path) -> str | None:
    if tag is not None:
        return str(tag)
    return (latest.read_text(errors="replace").strip() or "?") if latest.is_file() else None


def _inspect(engine: Any, folder: Path, weights_only: bool) -> None:
    """Refuse a checkpoint that is not whole or does not fit; each rank looks at its share of the files."""
    if not folder.exists():
        raise ScapeCheckpointError(manifest.explain_missing(folder))
    if weights_only and not (folder / manifest.NAME).exists():
        logger.warning(f"SCAPE: {folder} has no {manifest.NAME}: another optimizer's, and nothing tells if it is whole")
        return
    listed = manifest.read(folder)
    universal = engine.load_universal_checkpoint()
    if universal != listed.get("universal", False):
        kind, value = ("not universal", "false") if universal else ("universal", "true")
        raise ScapeCheckpointError(
            f"checkpoint.load_universal = {str(universal).lower()}: {folder} is {kind}. Remedy: set it to {value}"
        )
    if not weights_only:
        checkpoint.check(listed, engine.optimizer, universal)
    if universal and engine.global_rank == 0:
        _warn_of_newer(folder.parent, listed["step"])
    if not (universal or weights_only) and listed["bf16"] != bool(engine.bfloat16_enabled()):
        raise ScapeCheckpointError(
            f"bf16.enabled = {str(not listed['bf16']).lower()}: the checkpoint was written with the contrary, and "
            "DeepSpeed names its files after it. Remedy: set it back, or use python -m deepspeed_scape.universal"
        )
    share = slice(None) if engine.use_node_local_storage() else _own_share(engine)
    if problem := manifest.find_damage(folder, listed["files"], list(listed["files"])[share]):
        raise ScapeCheckpointError(problem)


def _warn_of_newer(folder: Path, step: int) -> None:
    """A run that was converted once, and started again with load_universal still set, would repeat its steps."""
    with contextlib.suppress(OSError, ScapeCheckpointError):
        tag = (folder / "latest").read_text().strip()
        newest = manifest.read(folder / tag)["step"]
        if newest > step:
            logger.warning(
                f"SCAPE: checkpoint.load_universal goes on from step {step}, but {folder / tag} has step {newest}; "
                "set load_universal to false to go on from there"
            )


def _own_share(engine: Any) -> slice:
    group = engine.optimizer.dp_process_group
    return slice(dist.get_rank(group), None, dist.get_world_size(group))


def _load_frozen(engine: Any, load_dir: str, tag: str, strict: bool, custom_load_fn: Any) -> None:
    """Frozen weights and buffers of a universal checkpoint, which DeepSpeed leaves as they are."""
    path = engine._get_ckpt_name(load_dir, tag)
    state = engine.checkpoint_engine.load(path, map_location=torch.device("cpu"))
    engine.load_module_state_dict(checkpoint=state, strict=strict, custom_load_fn=custom_load_fn)
