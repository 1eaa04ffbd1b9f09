"""Keys and values of the sequences that are decoded together.

Sequence i of the batch lies in row i, its token t in column t: a step attends to a view of the first rows and
columns without copying. A row is freed by moving the last one into it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Columns are added in steps of this many tokens.
_COLUMN_STEP = 256


class BatchCache:
    """[rows, heads, columns, head size] per layer, for keys and values; grows on demand."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._positions = torch.zeros(0, dtype=torch.long)
        self._rows = torch.zeros(0, dtype=torch.long)
        self._columns = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def clear(self) -> None:
        """Forget every sequence and free the memory."""
        self.lengths = []
        self._keys, self._values = [], []

    def append(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add a sequence's prefill: per layer (keys, values) [heads, T, head size]."""
        row, num = len(self.lengths), layers[0][0].shape[1]
        self._reserve(row + 1, num + 1, layers)
        for layer, (keys, values) in enumerate(layers):
            self._keys[layer][row, :, :num] = keys
            self._values[layer][row, :, :num] = values
        self.lengths.append(num)

    def remove(self, row: int) -> None:
        """Free a row; the last sequence takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            num = self.lengths[last]
            for store in (*self._keys, *self._values):
                store[row, :, :num] = store[last, :, :num]
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def begin_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Make room for one token per sequence: its positions [B] and the mask [B, 1, 1, columns]."""
        self._reserve(len(self.lengths), max(self.lengths) + 1, ())
        self._positions = torch.tensor(self.lengths, dtype=torch.long)
        self._rows = torch.arange(len(self.lengths))
        self._columns = max(self.lengths) + 1
        mask = torch.arange(self._columns)[None, :] <= self._positions[:, None]
        return self._positions, mask[:, None, None, :]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One token per sequence, [B, heads, 1, head size]; returns views of all tokens."""
        self._keys[layer][self._rows, :, self._positions] = keys[:, :, 0]
        self._values[layer][self._rows, :, self._positions] = values[:, :, 0]
        num = len(self.lengths)
        return self._keys[layer][:num, :, : self._columns], self._values[layer][:num, :, : self._columns]

    def end_step(self) -> None:
        """The step's tokens are part of the sequences now."""
        self.lengths = [n + 1 for n in self.lengths]

    def _reserve(self, rows: int, columns: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if not self._keys:
            have_rows = have_columns = 0
        else:
            have_rows, have_columns = self._keys[0].shape[0], self._keys[0].shape[2]
        if rows <= have_rows and columns <= have_columns:
            return
        new_rows = have_rows if rows <= have_rows else max(rows, 2 * have_rows, 8)
        new_columns = have_columns
        if columns > have_columns:
            new_columns = -(-columns // _COLUMN_STEP) * _COLUMN_STEP
        for stores, side in ((self._keys, 0), (self._values, 1)):
            if stores:
                stores[:] = [_grown(old, old[0], new_rows, new_columns) for old in stores]
            else:
                stores += [_grown(None, pair[side], new_rows, new_columns) for pair in layers]


def _grown(old: torch.Tensor | None, like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A zeroed store of the new size that holds the old one. Zeros: a masked cell must never be a NaN."""
    store = like.new_zeros(rows, like.shape[0], columns, like.shape[2])
    if old is not None:
        store[: old.shape[0], :, : old.shape[2]] = old
    return store
