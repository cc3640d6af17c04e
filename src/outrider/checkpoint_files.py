"""The files of checkpoints: what a checkpoint says of itself, finding one that is whole, and deleting old ones.

::

    checkpoints/N/manifest.json        what it holds, what it does not, and checksums; N = opt steps
    checkpoints/N/state.json ...       parameters, optimisers, counters, random states (outrider.state_files)
    checkpoints/replay/A-B-SUM.npy     rows A to B of the replay, shared by checkpoints (outrider.replay_segments)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from outrider.data import Array
from outrider.durable import replace_text, whole_directory
from outrider.errors import CheckpointError
from outrider.replay_segments import Segment, check_file, read_blocks
from outrider.state_files import STATE_FILES, read_state
from outrider.version import __version__

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
ROWS = "replay"
"""Directory of the rows beside the checkpoints."""
SET_ASIDE = ".set-aside"


@dataclass(frozen=True)
class Moment:
    """Where a run is.

    Attributes:
        opt_steps: Opt steps so far.
        env_steps: Env steps so far.
        time_s: Seconds of training so far.
        score: Score of the last evaluation, None if there was none.
        reason: Why the checkpoint is taken: ``interval``, what ended the run, or the name of an error.
    """

    opt_steps: int
    env_steps: int
    time_s: float
    score: float | None
    reason: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        moment: Where the run was.
        files: Checksums of its files by name.
        segments: Files of the rows of the replay buffer, in order.
        not_contained: What a resumed run has to do without.
        written: When it was written, local time.
        outrider: Version of the package that wrote it.
    """

    moment: Moment
    files: dict[str, str]
    segments: tuple[Segment, ...] = ()
    not_contained: tuple[str, ...] = ()
    written: str = ""
    outrider: str = __version__

    def to_json(self) -> str:
        """The text of the file; its last line is a checksum of the rest."""
        values = {"format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(values | {"checksum": _checksum(values)}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointError: It is missing, torn, changed, or of another format.
        """
        file = path / MANIFEST
        try:
            values = json.loads(file.read_text())
            found = values.pop("checksum")
            if found != _checksum(values):
                raise CheckpointError(f"{file}: expected what its checksum says, got something else")
            version = values.pop("format_version")
            if version != FORMAT_VERSION:
                raise CheckpointError(f"{file}: expected format_version {FORMAT_VERSION}, got {version}")
            values["moment"] = Moment(**values["moment"])
            values["segments"] = tuple(Segment(**segment) for segment in values["segments"])
            values["not_contained"] = tuple(values["not_contained"])
            return cls(**values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file}: expected a manifest, got {type(error).__name__}: {error}") from error


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read.

    Attributes:
        path: Its directory.
        manifest: What it says of itself.
        state: What was saved, by name.
        rows_lost: Why the rows of the replay buffer cannot be used though they were saved, empty if they can.
    """

    path: Path
    manifest: Manifest
    state: dict[str, Any] = field(repr=False)
    rows_lost: str = ""

    @property
    def moment(self) -> Moment:
        """Where the run was."""
        return self.manifest.moment

    def blocks(self) -> Iterator[tuple[int, Array]]:
        """First row and rows of each segment of the replay buffer, one at a time."""
        return read_blocks(self.path.parent / ROWS, self.manifest.segments)


def opt_steps_of_checkpoints(folder: Path) -> list[int]:
    """The checkpoints in a directory, damaged ones included, the newest first."""
    names = {path.name for path in folder.glob("[0-9]*") if (path / MANIFEST).exists()}
    names |= {path.name[1 : -len(".old")] for path in folder.glob(".[0-9]*.old")}
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def read_checkpoint(path: Path, *, rows: bool = True) -> Checkpoint:
    """Read a checkpoint and compare all of its files with their checksums.

    Args:
        path: Its directory.
        rows: Refuse it also for damage in the rows of the replay buffer.

    Raises:
        CheckpointError: It is damaged; says where.
    """
    manifest = Manifest.read(path)
    for name in STATE_FILES:
        check_file(path / name, manifest.files.get(name, "no checksum at all"))
    rows_lost = ""
    try:
        for one, following in pairwise(manifest.segments):
            if one.stop != following.first:
                raise CheckpointError(f"{path}: expected rows without a gap, got {one.file} before {following.file}")
        for segment in manifest.segments:
            segment.check(path.parent / ROWS)
    except CheckpointError as error:
        if rows:
            raise
        rows_lost = str(error)
    return Checkpoint(path, manifest, read_state(path), rows_lost)


def newest_checkpoint(folder: Path, opt_steps: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole; if none is, the newest of which only rows of the replay are damaged.

    Args:
        folder: The directory of the checkpoints.
        opt_steps: Take this one, and no other.

    Returns:
        The checkpoint, None if there has never been one; and what is wrong with newer ones.

    Raises:
        CheckpointError: There are some, but all are damaged; or not the one asked for.
    """
    there = opt_steps_of_checkpoints(folder)
    if opt_steps is not None and opt_steps not in there:
        known = ", ".join(map(str, there)) or "none at all"
        raise CheckpointError(f"{folder}: expected a checkpoint {opt_steps}, got {known}")
    wanted = there if opt_steps is None else [opt_steps]
    damages: list[str] = []
    for rows in (True, False):
        for n in wanted:
            try:
                return read_checkpoint(whole_directory(folder / str(n)), rows=rows), damages
            except CheckpointError as error:
                damages.append(str(error))
    if damages:
        raise CheckpointError(f"{folder}: expected a checkpoint that is whole, got\n  " + "\n  ".join(damages))
    return None, []


def set_newer_aside(folder: Path, opt_steps: int) -> list[Path]:
    """Rename checkpoints that are newer than the one a run goes on from: they are of a course it has left.

    Returns:
        Where they are now.
    """
    moved = []
    for n in opt_steps_of_checkpoints(folder):
        if n > opt_steps:
            source, target = whole_directory(folder / str(n)), folder / f"{n}{SET_ASIDE}"
            shutil.rmtree(target, ignore_errors=True)
            source.rename(target)
            moved.append(target)
    return moved


def sweep(folder: Path) -> None:
    """Delete what a run that was killed has left half written, half replaced or half deleted."""
    for path in (*folder.glob(".*.new"), *folder.glob("[0-9]*"), *folder.glob(".*.old")):
        replaced = path.suffix == ".old" and (folder / path.stem[1:] / MANIFEST).exists()
        torn = path.name.isdigit() and not (path / MANIFEST).exists()
        if path.suffix == ".new" or replaced or torn:
            shutil.rmtree(path, ignore_errors=True)


def rotate(folder: Path, keep: int) -> set[str]:
    """Delete all checkpoints but the newest and that with the best score, and rows that none of them refers to.

    The best one loses its rows when it is not among the newest: as many buffers as wanted are kept, not one more.

    Args:
        folder: The directory of the checkpoints.
        keep: How many of the newest are kept.

    Returns:
        Files of rows that are still referred to.

    Raises:
        OSError: Something could not be deleted or written.
    """
    manifests: dict[int, Manifest] = {}
    for n in opt_steps_of_checkpoints(folder):
        with contextlib.suppress(CheckpointError):
            manifests[n] = Manifest.read(whole_directory(folder / str(n)))
    newest = list(manifests)[:keep]
    scored = [(m.moment.score, n) for n, m in manifests.items() if m.moment.score is not None]
    best = max(scored)[1] if scored else None
    for n, manifest in list(manifests.items()):
        if n in newest:
            continue
        if n == best:
            manifests[n] = _without_rows(whole_directory(folder / str(n)), manifest)
        else:
            _delete(whole_directory(folder / str(n)))
            del manifests[n]
    needed = {segment.file for manifest in manifests.values() for segment in manifest.segments}
    for path in (folder / ROWS).glob("*"):
        if path.name not in needed:
            path.unlink(missing_ok=True)
    return needed


def _without_rows(path: Path, manifest: Manifest) -> Manifest:
    if not manifest.segments:
        return manifest
    values = {name: getattr(manifest, name) for name in ("moment", "files", "written", "outrider")}
    lost = Manifest(**values, not_contained=(*manifest.not_contained, "the replay buffer, too old to be kept"))
    replace_text(path / MANIFEST, lost.to_json())
    return lost


def _delete(path: Path) -> None:
    """Without a manifest it is no checkpoint any more, however far the rest gets."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
