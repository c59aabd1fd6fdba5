"""What only CUDA has, emulated on CPU: products of bf16 or fp16 operands into float32."""

from contextlib import ExitStack
from unittest import mock

import torch


class NarrowProducts(ExitStack):
    """While entered, heads multiply narrow operands into float32 as a GPU's library does; `count`
    is the number of such products. Functions are replaced, because a mode does not reach into the
    backward."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __enter__(self):
        super().__enter__()
        self.enter_context(mock.patch("fgrpo_kernels.head.multiplies_narrow", lambda weight: True))
        for name in ("mm", "addmm"):
            product = getattr(torch, name)
            self.enter_context(mock.patch.object(torch, name, self._widened(product)))
        return self

    def _widened(self, product):
        def call(*args, out_dtype=None, **kwargs):
            if out_dtype is not None:
                assert args[-2].dtype == args[-1].dtype and args[-1].dtype.itemsize == 2
                args = (*args[:-2], *(t.to(out_dtype) for t in args[-2:]))
                self.count += 1
            return product(*args, **kwargs)

        return call
