"""The product of weights and values when some values are not finite."""

from __future__ import annotations

import torch
from torch import Tensor


def weighted_values(weight: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """weight @ v in which a value that is not finite reaches only the rows that see its key.

    A plain product would turn 0 x NaN of an invisible key into NaN for every row of the tile.

    Args:
        weight: (heads, rows, keys), 0 where a key is invisible.
        v: (heads, keys, head_dim_v).
        seen: bool (rows, keys) or (heads, rows, keys), whether the row sees the key.

    Returns:
        (heads, rows, head_dim_v).
    """
    finite = v.isfinite()
    total = weight @ torch.where(finite, v, 0.0)
    if bool(finite.all()):
        return total
    for c in (~finite.all(-1)).any(0).nonzero().flatten().tolist():
        odd = torch.where(finite[:, c], 0.0, v[:, c])  # (heads, head_dim_v)
        spread = weight[..., c, None] * odd[:, None, :]
        total = total + torch.where(seen[..., c, None] & ~finite[:, c][:, None, :], spread, 0.0)
    return total
