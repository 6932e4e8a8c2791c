"""The short way through fakes gives what FakeTensorMode gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rewrite.memory.quick import DIRECT, ELEMENTWISE, QuickFakes

aten = torch.ops.aten


def arguments(func: Any, x: torch.Tensor, matrix: torch.Tensor) -> tuple[Any, ...]:
    special: dict[Any, tuple[Any, ...]] = {
        aten.mm.default: (matrix, matrix.t()),
        aten.t.default: (matrix,),
        aten.bmm.default: (x, x.transpose(1, 2)),
        aten.as_strided.default: (x, (4, 8), (8, 1), 3),
        aten.expand.default: (x[:1], (5, 8, 16)),
        aten.permute.default: (x, (2, 0, 1)),
        aten.select.int: (x, 1, 2),
        aten.slice.Tensor: (x, 1, 2, 6, 2),
        aten.squeeze.dim: (x[:1], 0),
        aten.transpose.int: (x, 0, 2),
        aten.unsqueeze.default: (x, 1),
        aten.view.default: (x, (32, 16)),
        aten._unsafe_view.default: (x, (32, 16)),
        aten.pow.Tensor_Scalar: (x, 2),
    }
    if func in special:
        return special[func]
    if func._overloadname == "Scalar":
        return (x, 2.0)
    return (x, x) if func._overloadname == "Tensor" or "backward" in str(func) else (x,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("func", sorted(DIRECT | ELEMENTWISE, key=str), ids=str)
def test_is_what_the_mode_gives(func: Any, dtype: torch.dtype) -> None:
    mode = FakeTensorMode()
    with mode:
        args = arguments(func, torch.empty(4, 8, 16, dtype=dtype), torch.empty(8, 16, dtype=dtype))
        quick, slow = QuickFakes(mode).run(func, args), func(*args)

        assert type(quick) is FakeTensor
        assert (quick.shape, quick.stride(), quick.storage_offset(), quick.dtype, quick.device) == (
            (slow.shape, slow.stride(), slow.storage_offset(), slow.dtype, slow.device)
        )
        assert quick.untyped_storage().nbytes() == slow.untyped_storage().nbytes()
        shares = quick.untyped_storage()._cdata == args[0].untyped_storage()._cdata
        assert shares == (slow.untyped_storage()._cdata == args[0].untyped_storage()._cdata)


def test_leaves_what_is_not_alike_to_the_mode() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    quick = QuickFakes(mode)
    with mode:
        x, half, row = torch.empty(4, 8), torch.empty(4, 8, dtype=torch.float16), torch.empty(8)

        assert quick.run(aten.mul.Tensor, (x, half)) is None
        assert quick.run(aten.mul.Tensor, (x, row)) is None
        assert quick.run(aten.mul.Tensor, (x.t(), x.t())) is None
        assert quick.run(aten.mul.Scalar, (x, 1j)) is None
        assert quick.run(aten.exp.default, (x.to(torch.int64),)) is None
    assert quick.run(aten.mm.default, (x, torch.ones(8, 2))) is None
