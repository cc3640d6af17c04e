"""State as files that anybody can read and that run no code: ``state.json``, ``arrays.npz``, ``tensors.safetensors``.

``state.json`` has the tree. What JSON lacks stands in it as an object with one key::

    {"$array": 3}      array 3 of arrays.npz        {"$tuple": [...]}   a tuple
    {"$scalar": 3}     the same, a numpy scalar     {"$dict": [[k, v]]} keys that are no strings, or begin with $
    {"$tensor": 0}     tensor 0                     {"$float": "nan"}   nan, inf or -inf
    {"$bytes": 4}      bytes, as an array           {"$int": "0x1f"}    an integer of more than 63 bits
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.data import Array
from outrider.errors import CheckpointError

STATE, ARRAYS, TENSORS = "state.json", "arrays.npz", "tensors.safetensors"
STATE_FILES = (STATE, ARRAYS, TENSORS)

MAX_DEPTH = 100
"""Levels of a state; more are a circle."""

_EXPECTED = "dict, list, tuple, str, bytes, int, float, bool, None, a numpy array or scalar, or a tensor"
_KINDS = frozenset("biufcmMSUV")  # kinds of numpy types that are plain bytes


class PackedState:
    """A copy of a state, ready to be written: what it was made of may change from now on.

    A dict may be an ``OrderedDict``, and comes back as a dict; a parameter comes back as a tensor on the CPU.

    Args:
        state: Nested dicts, lists and tuples of plain values, numpy arrays and tensors, by name.

    Raises:
        CheckpointError: Something in it cannot be stored; says where.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._arrays: list[Array] = []
        self._tensors: list[Tensor] = []
        self._tree = self._pack(state, "", 0)

    def write(self, folder: Path) -> None:
        """Write :data:`STATE_FILES` into an existing directory.

        Raises:
            OSError: They could not be written; torch's writer raises a ``SafetensorError`` instead.
        """
        (folder / STATE).write_text(json.dumps(self._tree, allow_nan=False) + "\n")
        with ZipFile(folder / ARRAYS, "w") as archive:
            for i, array in enumerate(self._arrays):
                with archive.open(f"{i}.npy", "w", force_zip64=True) as file:
                    write_npy(file, array)
        save_file({str(i): tensor for i, tensor in enumerate(self._tensors)}, folder / TENSORS)

    def _pack(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is bytes:
            return {"$bytes": self._keep(np.frombuffer(value, np.uint8), where)}
        if isinstance(value, np.generic):
            return {"$scalar": self._keep(np.asarray(value), where)}
        if kind in (np.ndarray, np.memmap):
            return {"$array": self._keep(value, where)}
        if isinstance(value, Tensor):
            return {"$tensor": self._keep_tensor(value, where)}
        if depth >= MAX_DEPTH:
            raise CheckpointError(f"state: expected at most {MAX_DEPTH} levels, got more at {where[:80]}...")
        if kind in (list, tuple):
            parts = [self._pack(part, f"{where}[{i}]", depth + 1) for i, part in enumerate(value)]
            return parts if kind is list else {"$tuple": parts}
        if kind in (dict, OrderedDict):
            return self._pack_dict(value, where, depth + 1)
        raise CheckpointError(
            f"state {where or 'as a whole'}: expected {_EXPECTED}, got {kind.__module__}.{kind.__qualname__}"
        )

    def _pack_dict(self, value: dict[Any, Any], where: str, depth: int) -> Any:
        parts = {key: self._pack(part, f"{where}.{key}" if where else str(key), depth) for key, part in value.items()}
        if all(type(key) is str and not key.startswith("$") for key in parts):
            return parts
        return {"$dict": [[self._pack(key, f"{where} (a key)", depth), part] for key, part in parts.items()]}

    def _keep(self, array: Array, where: str) -> int:
        dtype = array.dtype
        strange = dtype.kind == "V" and dtype.type is not np.void  # such as bfloat16 of another package
        if dtype.hasobject or dtype.kind not in _KINDS or strange:
            raise CheckpointError(f"state {where}: expected an array of numbers, bytes or text, got one of {dtype}")
        self._arrays.append(np.array(array, order="C"))
        return len(self._arrays) - 1

    def _keep_tensor(self, tensor: Tensor, where: str) -> int:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CheckpointError(f"state {where}: expected a dense tensor with values, got {tensor.layout}")
        plain = tensor.detach().resolve_conj().resolve_neg().to("cpu")
        self._tensors.append(torch.clone(plain, memory_format=torch.contiguous_format))
        return len(self._tensors) - 1


def write_npy(file: IO[bytes], array: Array) -> None:
    """Write an array in the npy format; unlike ``np.save`` without a warning for column names that are not ASCII.

    Raises:
        OSError: It could not be written.
    """
    npy.write_array(file, array, version=(3, 0), allow_pickle=False)


def read_state(folder: Path) -> dict[str, Any]:
    """The state that :meth:`PackedState.write` wrote; runs no code, whoever wrote it.

    Raises:
        CheckpointError: The files are missing, torn, or say something that no state says.
    """
    try:
        tree = json.loads((folder / STATE).read_text())
        with np.load(folder / ARRAYS, allow_pickle=False) as stored:
            arrays = [stored[str(i)] for i in range(len(stored.files))]
        tensors = load_file(folder / TENSORS)
        state = _unpack(tree, arrays, tensors)
    except (OSError, ValueError, EOFError, BadZipFile, SafetensorError, RecursionError) as error:
        raise CheckpointError(f"{folder}: expected a stored state, got {type(error).__name__}: {error}") from error
    except (KeyError, IndexError, TypeError) as error:
        raise CheckpointError(f"{folder}: expected a stored state, got a tree that does not fit: {error!r}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{folder}: expected a stored state, got a {type(state).__name__}")
    return state


def _unpack(value: Any, arrays: list[Array], tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(part, arrays, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _unpack(part, arrays, tensors) for key, part in value.items()}
    inside = value[tag]
    if tag == "$array":
        return arrays[inside]
    if tag == "$scalar":
        return arrays[inside][()]
    if tag == "$bytes":
        return arrays[inside].tobytes()
    if tag == "$tensor":
        return tensors[str(inside)]
    if tag == "$int":
        return int(inside, 16)
    if tag == "$float":
        return float(inside)
    if tag == "$tuple":
        return tuple(_unpack(part, arrays, tensors) for part in inside)
    if tag == "$dict":
        return {_unpack(key, arrays, tensors): _unpack(part, arrays, tensors) for key, part in inside}
    raise KeyError(tag)
