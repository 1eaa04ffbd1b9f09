"""Keys and values of the sequences that are decoded together.

Sequence i of the batch lies in row i, its token t in column t: a step attends to a view of the first rows and
columns without copying, and writes one token of every sequence by a single copy. A row is freed by moving the last
one into it.

Shape letters: L attention layers, B sequences, C columns (tokens), H heads of keys, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Columns are added in steps of this many tokens.
_COLUMN_STEP = 256


class BatchCache:
    """One store [2L, rows, columns, H, D], keys of layer i at 2i and its values at 2i + 1; grows on demand."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._store: torch.Tensor | None = None
        #: Per index of the store: all its tokens, [rows * columns, H, D].
        self._flat: tuple[torch.Tensor, ...] = ()
        #: Per index of the store: what the running step attends to, [B, H, C, D].
        self._views: tuple[torch.Tensor, ...] = ()
        #: Where the running step writes, [B]: indices of `_flat`.
        self._at = torch.zeros(0, dtype=torch.long)
        #: The running step's position of every sequence, [B].
        self.positions = torch.zeros(0, dtype=torch.long)
        self._columns = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def clear(self) -> None:
        """Forget every sequence and free the memory."""
        self.lengths = []
        self._store, self._flat, self._views = None, (), ()

    def append(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add a sequence's prefill: per layer (keys, values) [H, T, D]."""
        row, num = len(self.lengths), layers[0][0].shape[1]
        store = self._reserve(row + 1, num + 1, layers)
        for layer, pair in enumerate(layers):
            for side, tokens in enumerate(pair):
                store[2 * layer + side, row, :num] = tokens.transpose(0, 1)
        self.lengths.append(num)

    def remove(self, row: int) -> None:
        """Free a row; the last sequence takes its place."""
        last = len(self.lengths) - 1
        if row != last and self._store is not None:
            num = self.lengths[last]
            self._store[:, row, :num] = self._store[:, last, :num]
            self.lengths[row] = num
        self.lengths.pop()

    def begin_step(self) -> None:
        """Make room for one token per sequence."""
        lengths = self.lengths
        num, self._columns = len(lengths), max(lengths) + 1
        store = self._reserve(num, self._columns, ())
        sides, rows, columns, heads, size = store.shape
        self.positions = self._at = torch.tensor(lengths)
        if num > 1:
            self._at = torch.tensor([row * columns + at for row, at in enumerate(lengths)])
        token = heads * size
        self._views = store.as_strided(
            (sides, num, heads, self._columns, size), (rows * columns * token, columns * token, size, token, 1)
        ).unbind(0)

    def mask(self) -> torch.Tensor:
        """What each sequence may attend to in the running step: boolean [B, 1, 1, C], True is attended."""
        return (torch.arange(self._columns) <= self.positions[:, None])[:, None, None, :]

    def is_even(self) -> bool:
        """All sequences have the same length: the running step needs no mask."""
        return min(self.lengths) + 1 == self._columns

    def put(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one token per sequence, [B, H, D]; returns views of all tokens, [B, H, C, D]."""
        index = 2 * layer
        self._flat[index].index_copy_(0, self._at, keys)
        self._flat[index + 1].index_copy_(0, self._at, values)
        return self._views[index], self._views[index + 1]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`put` as Hugging Face's attention calls it: keys and values are [B, H, 1, D]."""
        return self.put(keys[:, :, 0], values[:, :, 0], layer)

    def end_step(self) -> None:
        """The step's tokens are part of the sequences now."""
        self.lengths = [n + 1 for n in self.lengths]

    def _reserve(self, rows: int, columns: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        old = self._store
        have_rows, have_columns = (0, 0) if old is None else old.shape[1:3]
        if old is not None and rows <= have_rows and columns <= have_columns:
            return old
        new_rows = have_rows if rows <= have_rows else max(rows, 2 * have_rows, 8)
        new_columns = have_columns if columns <= have_columns else -(-columns // _COLUMN_STEP) * _COLUMN_STEP
        # Zeros: a masked cell must never be a NaN.
        if old is None:
            heads, _, size = layers[0][0].shape
            new = layers[0][0].new_zeros(2 * len(layers), new_rows, new_columns, heads, size)
        else:
            new = old.new_zeros(old.shape[0], new_rows, new_columns, *old.shape[3:])
            new[:, :have_rows, :have_columns] = old
        self._store = new
        self._flat = new.flatten(1, 2).unbind(0)
        return new
