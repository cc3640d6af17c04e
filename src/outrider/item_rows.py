"""Blocks of rows that step processors fill and hand out."""

from __future__ import annotations

import numpy as np

from outrider.data import Array, Layout, Obs, column_names, leaves


class Rows:
    """A block of records, with its columns as views. They are set by ``[...] =``, faster than ``[:] =``."""

    def __init__(self, rows: Array) -> None:
        self.rows = rows
        names = column_names(rows)
        self.columns: dict[str, Array] = {name: rows[name] for name in names}
        self.obs_names = tuple(name for name in names if name.split(".")[0] == "obs")
        self.act, self.reward = self.columns["act"], self.columns["reward"]
        self.terminated, self.truncated = self.columns["terminated"], self.columns["truncated"]
        self._version = 0

    @classmethod
    def zeros(cls, layout: Layout, n: int) -> Rows:
        """So many rows of a layout."""
        return cls(np.zeros(n, layout.record_dtype()))

    def put_obs(self, name: str, obs: Obs) -> None:
        """Copy the observations of all environments into the column(s) of this name."""
        if isinstance(obs, dict):
            for column, part in leaves(obs, name):
                self.columns[column][...] = part
        else:
            self.columns[name][...] = obs

    def put_version(self, version: int) -> None:
        """Fill the column ``model_version``."""
        if version != self._version:
            self._version = version
            self.columns["model_version"][...] = version


def valid_rows(rows: Array, valid: Array) -> Array | None:
    """The rows ``[m]`` with a True in `valid`, themselves if that is all of them; None if there are none."""
    flags = valid.tolist()
    if False not in flags:
        return rows
    return rows[valid] if True in flags else None
