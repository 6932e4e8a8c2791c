"""Memory that attention's CPU kernel takes below the dispatcher: the scores of one tile of queries, for each thread.

Sizes as in ATen/native/cpu/FlashAttentionKernel.cpp. In half precision its products may take more (oneDNN's blocks).
"""

from __future__ import annotations

import torch

KEYS = 512
"""Keys of a tile."""
QUERIES = ((768, 256), (192, 64), (0, 32))
"""Queries of a tile, by the least number of queries that there are."""


def forward_bytes(query: torch.Tensor, key: torch.Tensor) -> int:
    """`query`, `key`: (batch, heads, length, width). Scores, their maxima and sums, and a tile of results."""
    queries, keys = _tile(query, key)
    wide = queries * (keys + 2 + query.shape[-1])
    return torch.get_num_threads() * (wide * _wide_size(query) + _narrow_size(query) * queries * keys)


def backward_bytes(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> int:
    """Scores and their gradients, with sums; and the gradient of the result anew, where it does not lie row by row."""
    queries, keys = _tile(query, key)
    tiles = torch.get_num_threads() * 2 * queries * keys * (_wide_size(query) + _narrow_size(query))
    again = 0 if grad.transpose(1, 2).is_contiguous() else grad.numel() * grad.itemsize
    return tiles + queries * _wide_size(query) + again


def _tile(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    length = query.shape[-2]
    queries = next(size for least, size in QUERIES if length >= least)
    return min(queries, length), min(KEYS, key.shape[-2])


def _wide_size(query: torch.Tensor) -> int:
    """Bytes of a number that is added up."""
    return max(query.itemsize, 4)


def _narrow_size(query: torch.Tensor) -> int:
    """Bytes of a number that is multiplied, where that is another type."""
    return query.itemsize if query.itemsize < 4 else 0
