"""What travels along the path of a transition: Step, items, Batch, Record, and the layout of their columns.

An *item* is one row of a replay buffer's input. A :class:`Layout` names its columns; one aligned numpy
dtype (:meth:`Layout.record_dtype`) describes a row in shared memory, in the replay buffer and in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from outrider.errors import LayoutMismatch

Array: TypeAlias = NDArray[Any]
Obs: TypeAlias = "Array | dict[str, Obs]"
"""Observations of n environments: an array ``[n, ...]``, or a nested dict of such arrays."""

Items: TypeAlias = "Mapping[str, Array] | Array"
"""Rows by column name: a mapping of arrays ``[m, ...]``, or one structured array ``[m]``."""

ModelInfo: TypeAlias = Mapping[str, Array]
"""Everything acting needs, by name, each with a fixed dtype and shape.

A receiver hands out views of its private snapshot: they keep their addresses and are overwritten only
inside the next fetch. :data:`ENV_STEPS` is added by the sender."""

ENV_STEPS = "env_steps"
"""Reserved name in a :data:`ModelInfo`: the run's env steps when it was published (int64 scalar)."""

RecordValue: TypeAlias = "float | int | str | Array"
Record: TypeAlias = dict[str, RecordValue]
"""Metrics by name, such as ``{"train/loss": 0.3}``; merged with ``|``."""


@dataclass(frozen=True)
class Field:
    """One column: every row holds an array of this shape and dtype (shape ``()``: a scalar)."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype}"


ItemKind: TypeAlias = Literal["transitions", "frames"]


@dataclass(frozen=True)
class Layout:
    """The columns of one kind of item.

    Kinds:
        ``transitions``: ``obs, act, reward, next_obs, terminated, truncated, n_steps, model_version``.
        ``frames``: a frame stream, ``frame, t, act, reward, terminated, truncated, env``, the final frame of an
        episode as an entry of its own; ``frame_stack`` frames make up an observation.

    A Dict observation has one column per leaf: ``obs.image``, ``obs.pos.xy``.
    """

    kind: ItemKind
    fields: tuple[Field, ...]
    frame_stack: int = 0

    def __post_init__(self) -> None:
        names = self.names
        if len(set(names)) != len(names):
            raise LayoutMismatch(f"layout: expected distinct column names, got {list(names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Column names, in order."""
        return tuple(f.name for f in self.fields)

    def record_dtype(self) -> np.dtype[Any]:
        """The aligned structured dtype of one row; equal layouts of a process share one, so ``is`` can compare them."""
        return _record_dtype(self.fields)

    def require_equal(self, other: Layout, ours: str, theirs: str) -> None:
        """Compare two layouts.

        Raises:
            LayoutMismatch: Names the first column that differs, and both sides.
        """
        if self == other:
            return
        if self.kind != other.kind:
            raise LayoutMismatch(f"{ours} expects {self.kind}, {theirs} has {other.kind}")
        mine, its = {f.name: f for f in self.fields}, {f.name: f for f in other.fields}
        for name in [*mine, *its]:
            if mine.get(name) != its.get(name):
                raise LayoutMismatch(
                    f"column {name!r}: {ours} expects {mine.get(name, 'no such column')}, "
                    f"{theirs} has {its.get(name, 'no such column')}"
                )
        if self.frame_stack != other.frame_stack:
            raise LayoutMismatch(f"{ours} stacks {self.frame_stack} frames, {theirs} has {other.frame_stack}")
        raise LayoutMismatch(f"columns: {ours} expects order {self.names}, {theirs} has {other.names}")


@lru_cache(maxsize=256)
def _record_dtype(fields: tuple[Field, ...]) -> np.dtype[Any]:
    # By their codes: a dtype that was pickled equals numpy's own, but only between its own are arrays copied quickly.
    return np.dtype([(f.name, f.dtype.str, f.shape) for f in fields], align=True)


@dataclass(slots=True)
class Step:
    """What one call of :meth:`outrider.core.Env.step` brought, for n environments at once.

    The arrays belong to the environment and hold until its next ``step`` or ``reset``: whoever keeps them
    copies them.

    Attributes:
        act: The actions that were asked for ``[n, ...]``, as the policy gave them.
        obs: The true last observation of each environment, never one of a reset.
        init_obs: The observation to act on next: the first of the next episode where one ended, else ``obs``.
        reward: ``[n]`` float64.
        terminated: ``[n]`` bool; the episode ended in the sense of the problem.
        truncated: ``[n]`` bool; the episode was cut, such as by a time limit.
        valid: ``[n]`` bool; False for rows that were only a reset: no transition, no env step.
        raw_reward: ``[n]`` rewards before clipping, for statistics; None: same as ``reward``.
        model_version: Version of the model that chose ``act``; set by the Sampler.
    """

    act: Array
    obs: Obs
    init_obs: Obs
    reward: Array
    terminated: Array
    truncated: Array
    valid: Array
    raw_reward: Array | None = None
    model_version: int = 0


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode: its undiscounted return of unclipped rewards, its length in env steps, and its env."""

    ret: float
    length: int
    env: int


@dataclass(slots=True)
class Batch:
    """Rows drawn from a replay buffer; the arrays belong to the buffer and hold until its next ``batch``.

    Attributes:
        rows: The drawn rows ``[B]`` by column name.
        ixs: What the buffer knows them by ``[B]`` int64, for ``update_priority``.
        weights: Importance weights ``[B]`` float32, None for uniform sampling.
    """

    rows: Items
    ixs: Array
    weights: Array | None = None

    def __getitem__(self, column: str) -> Array:
        return self.rows[column]

    def __len__(self) -> int:
        return len(self.ixs)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return column_names(self.rows)

    @property
    def obs(self) -> Obs:
        """Observations ``[B, ...]``, nested for Dict spaces."""
        return nest(self.rows, "obs")

    @property
    def next_obs(self) -> Obs:
        """True successors ``[B, ...]``: n steps later for n-step transitions."""
        return nest(self.rows, "next_obs")


@dataclass(slots=True)
class UpdateResult:
    """What one gradient update of an agent brought.

    Attributes:
        td_errors: ``[B]`` float32 for ``update_priority``, None if the agent has none. It may be lazy
            (a tensor on a device): converting it to numpy is the caller's cost.
        record: Metrics, filled only when a record was asked for.
    """

    td_errors: Any = None
    record: Record = field(default_factory=dict)


_CODES = {np.dtype(f"={code}").str[1:]: code for code in "bBhHiIqQfd"} | {"b1": "?"}


def struct_code(dtype: np.dtype[Any]) -> str | None:
    """How :mod:`struct` calls a scalar of this dtype in standard sizes (``=``), None if it does not know it."""
    return _CODES.get(dtype.str[1:]) if dtype.isnative else None


def any_true(flags: Array) -> bool:
    """Whether one of these bools is True; for few of them a tenth of the time of ``flags.any()``."""
    return b"\1" in flags.tobytes()


def column_names(rows: Items) -> tuple[str, ...]:
    """Names of the columns of a mapping or a structured array."""
    if isinstance(rows, np.ndarray):
        return tuple(rows.dtype.names or ())
    return tuple(rows)


def n_rows(rows: Items) -> int:
    """Number of rows of a mapping or a structured array."""
    if isinstance(rows, np.ndarray):
        return len(rows)
    return len(next(iter(rows.values()))) if rows else 0


def nest(rows: Items, name: str) -> Obs:
    """The column ``name``, or the nested dict of the columns below it (``name.a.b``), as views.

    Raises:
        KeyError: There is neither.
    """
    names = column_names(rows)
    if name in names:
        return rows[name]
    tree: dict[str, Obs] = {}
    for column in names:
        if column.startswith(name + "."):
            *path, leaf = column[len(name) + 1 :].split(".")
            node = tree
            for key in path:
                node = cast("dict[str, Obs]", node.setdefault(key, {}))
            node[leaf] = rows[column]
    if not tree:
        raise KeyError(f"no column {name!r} or {name!r}.*, there are {names}")
    return tree


def leaves(obs: Obs, name: str) -> Iterator[tuple[str, Array]]:
    """Column name and array of each leaf of an observation, in the order of its dict."""
    if isinstance(obs, dict):
        for key, value in obs.items():
            yield from leaves(value, f"{name}.{key}")
    else:
        yield name, obs
