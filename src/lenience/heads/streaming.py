"""Logistic regression on states in files; several problems share each pass over the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

BLOCK_ROWS = 1024
"""Number of rows read at a time."""
MEMORY = 10
"""Number of past steps that L-BFGS keeps."""
MOST_STEPS = 200
CLOSE_ENOUGH = 1e-5
"""Limits of a fit: the number of steps, and the largest component of the mean loss's gradient at
which it has converged."""
SHORTEST = 2.0**-20
"""Shortest step length to try."""


@dataclass(frozen=True)
class StreamedRows:
    """States [m, F] in safetensors files, in file order, restricted to the rows in `kept`."""

    paths: tuple[Path, ...]
    sizes: tuple[int, ...]
    """Number of rows in each file."""
    width: int
    kept: NDArray
    """[all rows] bool: True for rows in use."""

    @classmethod
    def of(cls, paths: Sequence[Path]) -> StreamedRows:
        shapes = []
        for path in paths:
            with safe_open(path, "pt") as file:
                shapes.append(file.get_slice("x").get_shape())
        sizes = tuple(int(shape[0]) for shape in shapes)
        return cls(
            tuple(paths), sizes, int(shapes[0][1]), np.ones(sum(sizes), dtype=bool)
        )

    def __len__(self) -> int:
        return int(self.kept.sum())

    def __getitem__(self, which: NDArray) -> StreamedRows:
        """Return a subset of the rows, given by a mask or by indices, in file order."""
        kept = np.zeros_like(self.kept)
        kept[np.flatnonzero(self.kept)[which]] = True
        return StreamedRows(self.paths, self.sizes, self.width, kept)

    @staticmethod
    def joined(parts: Sequence[StreamedRows]) -> StreamedRows:
        return StreamedRows(
            tuple(path for part in parts for path in part.paths),
            tuple(size for part in parts for size in part.sizes),
            parts[0].width,
            np.concatenate([part.kept for part in parts]),
        )

    def blocks(self) -> Iterator[Tensor]:
        """Yield the rows in blocks [n, F] float32."""
        start = 0
        for path, size in zip(self.paths, self.sizes):
            with safe_open(path, "pt") as file:
                states = file.get_slice("x")
                for first in range(0, size, BLOCK_ROWS):
                    end = min(first + BLOCK_ROWS, size)
                    kept = self.kept[start + first : start + end]
                    if kept.any():
                        block = states[first:end]
                        yield (
                            block if kept.all() else block[torch.from_numpy(kept)]
                        ).float()
            start += size

    def mean_and_scale(self) -> tuple[NDArray, NDArray]:
        """Return the mean [F] and the standard deviation [F], plus 1e-6, of the rows."""
        total, squares = (
            torch.zeros(self.width, dtype=torch.float64) for _ in range(2)
        )
        for block in self.blocks():
            total += block.double().sum(0)
        mean = total / len(self)
        for block in self.blocks():
            squares += (block.double() - mean).square().sum(0)
        return mean.numpy(), (squares / len(self)).sqrt().numpy() + 1e-6


@dataclass(frozen=True)
class LogisticProblem:
    """One of the logistic regressions that share their passes."""

    c: float
    """Inverse strength of the L2 penalty, as in scikit-learn."""
    rows: NDArray
    """[m] bool: rows in the training set."""


WeightedLabels = tuple["NDArray", "NDArray"]
"""Labels [m] of rows, from 0 to 1, and their weights [m]."""


@dataclass(frozen=True)
class Standardised:
    """Rows with their mean subtracted, divided by their standard deviation."""

    rows: StreamedRows
    mean: NDArray
    scale: NDArray

    @classmethod
    def of(cls, rows: StreamedRows) -> Standardised:
        return cls(rows, *rows.mean_and_scale())

    def blocks(self) -> Iterator[Tensor]:
        mean = torch.from_numpy(self.mean).float()
        scale = torch.from_numpy(self.scale).float()
        for block in self.rows.blocks():
            yield (block - mean) / scale

    def logits(self, weights: NDArray) -> NDArray:
        """Return the logits [m, K] of K linear heads [F + 1, K], whose last row is the bias."""
        matrix = torch.from_numpy(weights[:-1])
        bias = torch.from_numpy(weights[-1])
        blocks = (x @ matrix.float() + bias for x in self.blocks())
        return np.concatenate([logits.numpy() for logits in blocks])


def fit_together(
    x: Standardised,
    labelled: WeightedLabels,
    problems: Sequence[LogisticProblem],
    begin: NDArray | None = None,
) -> NDArray:
    """Return the heads [F + 1, K] of K problems on labelled rows x [m, F]. The last row holds the
    biases, which are not penalised. All problems take their L-BFGS steps in the same passes, from
    `begin` or from 0."""
    losses = _Losses(
        x,
        torch.from_numpy(labelled[0]).double()[:, None],
        torch.from_numpy(labelled[1]).double()[:, None],
        torch.from_numpy(np.stack([problem.rows for problem in problems], 1)),
        torch.tensor([problem.c for problem in problems], dtype=torch.float64),
    )
    width = x.rows.width + 1
    first = np.zeros((width, len(problems))) if begin is None else begin
    return _minimised(losses, torch.from_numpy(first.copy())).numpy()


@dataclass(frozen=True)
class _Losses:
    """Losses of K problems, with their gradients."""

    x: Standardised
    labels: Tensor
    """[m, 1]: labels from 0 to 1."""
    counts: Tensor
    """[m, 1]: weights of the rows."""
    rows: Tensor
    """[m, K] bool: training rows of each problem."""
    c: Tensor
    """[K]: inverse strengths of the penalties."""

    def __call__(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean losses [K], penalties included, and their gradients [F + 1, K], in one
        pass over the rows."""
        matrix = weights[:-1]
        bias = weights[-1]
        loss = torch.zeros_like(self.c)
        gradient = torch.zeros_like(weights)
        start = 0
        for block in self.x.blocks():
            part = slice(start, start + len(block))
            start += len(block)
            taken = self.rows[part] * self.counts[part]
            target = self.labels[part]
            # products in float32, which is faster; sums in float64, as losses of two steps
            # differ little
            logits = (block @ matrix.float()).double() + bias
            losses = torch.nn.functional.softplus(logits) - target * logits
            loss += (losses * taken).sum(0)
            off = (torch.sigmoid(logits) - target) * taken
            gradient[:-1] += (off.T.contiguous().float() @ block).double().T
            gradient[-1] += off.sum(0)
        counts = (self.rows * self.counts).sum(0)
        loss = (loss + matrix.square().sum(0) / (2 * self.c)) / counts
        gradient[:-1] += matrix / self.c
        return loss, gradient / counts


def _minimised(
    loss_and_gradient: Callable[[Tensor], tuple[Tensor, Tensor]], weights: Tensor
) -> Tensor:
    """Return the minima [D, K] of K convex functions, by L-BFGS with backtracking, starting from
    `weights` [D, K]. Each call of `loss_and_gradient` evaluates all K."""
    loss, gradient = loss_and_gradient(weights)
    changes = list[Tensor]()
    turns = list[Tensor]()
    length = 1 / gradient.norm(dim=0).clamp(min=1.0)
    for _ in range(MOST_STEPS):
        direction = -_lbfgs(gradient, changes, turns)
        slope = (direction * gradient).sum(0)
        goes_on = (gradient.abs().amax(0) > CLOSE_ENOUGH) & (slope < 0)
        length = length * goes_on  # a function at its minimum stays where it is
        tried = weights + length * direction
        new_loss, new_gradient = loss_and_gradient(tried)
        while (too_long := _is_too_long(length, new_loss - loss, slope)).any():
            length = torch.where(too_long, length / 2, length)
            tried = weights + length * direction
            new_loss, new_gradient = loss_and_gradient(tried)
        # a function whose loss did not fall at any length keeps its weights
        moved = (new_loss <= loss) & goes_on
        if not moved.any():
            break
        changes = [*changes[1 - MEMORY :], (tried - weights) * moved]
        turns = [*turns[1 - MEMORY :], (new_gradient - gradient) * moved]
        weights = torch.where(moved, tried, weights)
        loss = torch.where(moved, new_loss, loss)
        gradient = torch.where(moved, new_gradient, gradient)
        length = torch.ones_like(length)
    return weights


def _is_too_long(length: Tensor, change: Tensor, slope: Tensor) -> Tensor:
    """Return [K] bool: True for a step whose loss falls too little for its slope (Armijo 1966)."""
    return (change > 1e-4 * length * slope) & (length > SHORTEST)


def _lbfgs(
    gradient: Tensor, changes: Sequence[Tensor], turns: Sequence[Tensor]
) -> Tensor:
    """Return [D, K]: the gradients times the inverse Hessians estimated from the last steps
    (Nocedal 1980). Steps without curvature are ignored."""
    direction = gradient.clone()
    shares = list[Tensor]()
    scale = torch.ones(gradient.shape[1], dtype=gradient.dtype)
    bends = [(change * turn).sum(0) for change, turn in zip(changes, turns)]
    for change, turn, bend in zip(reversed(changes), reversed(turns), reversed(bends)):
        share = torch.where(bend > 0, (change * direction).sum(0) / bend, 0.0)
        shares.append(share)
        direction = direction - share * turn
    for turn, bend in zip(turns, bends):  # the scale of the last step with curvature
        scale = torch.where(bend > 0, bend / turn.square().sum(0), scale)
    direction = direction * scale
    for change, turn, bend, share in zip(changes, turns, bends, reversed(shares)):
        back = torch.where(bend > 0, (turn * direction).sum(0) / bend, 0.0)
        direction = direction + (share - back) * change
    return direction
