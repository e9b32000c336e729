"""Reading tensors from an unmodified Hugging Face directory: safetensors, single or sharded. Nothing else is read."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from splash.core.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class Checkpoint:
    """The tensors of a model directory, read slice by slice so that a rank touches only its share.

    Raises:
        CheckpointError: no safetensors in the directory, a shard missing, or a file truncated or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, Any] = {}
        self._where = self._locate()

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self.path / INDEX_FILE
        if index.exists():
            try:
                where = dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index} is not a safetensors index: {error}") from None
            missing = sorted({name for name in where.values() if not (self.path / name).exists()})
            if missing:
                raise CheckpointError(f"{self.path} lacks {', '.join(missing)}, which {INDEX_FILE} lists")
            return where
        if not (self.path / SINGLE_FILE).exists():
            raise CheckpointError(f"{self.path} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read")
        return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)

    def _open(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = safe_open(self.path / name, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.path / name} is truncated or damaged: {error}") from None
        return self._files[name]

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def read(
        self, name: str, shape: tuple[int, ...], rows: slice | None = None, columns: slice | None = None
    ) -> Tensor:
        """A tensor of the expected whole `shape`, or a slice of its first and second dims.

        Raises:
            CheckpointError: the tensor is absent or has another shape.
        """
        if name not in self._where:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        try:
            view = self._open(self._where[name]).get_slice(name)
            found = tuple(view.get_shape())
            if found != shape:
                raise CheckpointError(f"{name} has shape {list(found)}, and config.json asks for {list(shape)}")
            tensor: Tensor = (
                view[rows or slice(None), columns or slice(None)] if len(shape) > 1 else view[rows or slice(None)]
            )
        except SafetensorError as error:
            raise CheckpointError(f"{self.path / self._where[name]} cannot be read: {error}") from None
        if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
            raise CheckpointError(f"{name} is stored as {tensor.dtype}; float32, bfloat16 and float16 are served")
        return tensor

    def close(self) -> None:
        """Let go of the files."""
        self._files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a SPLASH dtype name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
