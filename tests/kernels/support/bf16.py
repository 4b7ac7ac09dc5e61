"""bfloat16 in Triton's interpreter, repaired while a context is open.

The interpreter (3.9) keeps bf16 values as uint16 bit patterns and computes on the patterns: sums, products,
comparisons and reductions are silently wrong and casts truncate. Here operands are widened to float32, the operation is
done there, and the result is rounded to nearest even: what a GPU does. Two smaller faults are repaired on the way:
comparisons keep the operand's dtype, and TF32 products keep all bits of their operands.

Nothing outside `right_bf16` is touched, and the interpreter is as before when the context closes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

_ON_BITS = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)


def widen(bits: Any) -> Any:
    """bf16 bit patterns (uint16) as float32 values."""
    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: Any) -> Any:
    """float32 values as bf16 bit patterns, rounded to nearest even; NaN stays NaN."""
    values = np.asarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_bf16(handle: Any) -> bool:
    return (
        isinstance(handle, TensorHandle)
        and not isinstance(handle.dtype, tl.pointer_type)
        and handle.dtype.scalar == tl.bfloat16
    )


def _wide(handle: Any) -> Any:
    return TensorHandle(widen(handle.data), tl.float32) if _is_bf16(handle) else handle


def _result(values: Any) -> TensorHandle:
    if values.dtype == np.bool_:
        return TensorHandle(values, tl.int1)
    return TensorHandle(narrow(values), tl.bfloat16)


def _repairs() -> dict[tuple[type, str], Callable[..., Any]]:
    """The repaired methods: (class, name) -> function. Originals are read now, so nested contexts work."""
    names = ("binary_op", "unary_op", "ternary_op", "cast_impl", "create_fp_to_fp", "create_dot", "create_fma")
    plain = {name: getattr(InterpreterBuilder, name) for name in names}
    plain_sum, plain_min_max = ReduceOps.sum, ReduceOps.min_max

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if (_is_bf16(lhs) or _is_bf16(rhs)) and op not in _ON_BITS:
            return _result(op(_wide(lhs).data, _wide(rhs).data))
        out = plain["binary_op"](self, lhs, rhs, op)
        return TensorHandle(out.data, tl.int1) if out.data.dtype == np.bool_ else out

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        return _result(op(widen(arg.data))) if _is_bf16(arg) else plain["unary_op"](self, arg, op)

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if op is not np.where and (_is_bf16(lhs) or _is_bf16(other)):
            return _result(op(_wide(lhs).data, _wide(rhs).data, _wide(other).data))
        return plain["ternary_op"](self, lhs, rhs, other, op)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        target = dst_type.scalar
        if _is_bf16(src):
            if target == tl.bfloat16:
                return TensorHandle(src.data, target)
            return TensorHandle(widen(src.data).astype(interpreter._get_np_dtype(dst_type)), target)
        if target == tl.bfloat16:
            return TensorHandle(narrow(src.data.astype(np.float32)), target)
        return plain["cast_impl"](self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        target = dst_type.scalar
        from_bf16 = _is_bf16(src) and target.primitive_bitwidth >= 16
        to_bf16 = target == tl.bfloat16 and src.dtype.scalar.primitive_bitwidth >= 16
        if from_bf16 or to_bf16:
            return cast_impl(self, src, dst_type)
        return plain["create_fp_to_fp"](self, src, dst_type, rounding_mode)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        a, b = _wide(a), _wide(b)
        # The name or the enum of TF32: 10 bits of mantissa, as tensor cores read float32. TF32x3 recovers them.
        if "TF32" in str(input_precision).upper() and "X3" not in str(input_precision).upper():
            if a.dtype.scalar == tl.float32 and not _is_bf16(a):
                a = TensorHandle(interpreter._round_f32_to_tf32(a.data), tl.float32)
            if b.dtype.scalar == tl.float32:
                b = TensorHandle(interpreter._round_f32_to_tf32(b.data), tl.float32)
        return plain["create_dot"](self, a, b, d, input_precision, max_num_imprecise_acc)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not _is_bf16(z):
            return plain["create_fma"](self, x, y, z)
        return _result(plain["create_fma"](self, _wide(x), _wide(y), _wide(z)).data)

    def reduce_sum(self: Any, tensor: Any) -> Any:
        if tensor.dtype != tl.bfloat16:
            return plain_sum(self, tensor)
        total = np.sum(widen(tensor.handle.data), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(narrow(total), tl.bfloat16)

    def reduce_min_max(self: Any, tensor: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        first = tensor[0] if isinstance(tensor, tuple) else tensor
        if first.dtype != tl.bfloat16:
            return plain_min_max(self, tensor, val_reduce_op, idx_reduce_op)
        kind = tl.block_type(tl.float32, list(first.shape))
        wide = tl.core.tensor(TensorHandle(widen(first.handle.data), tl.float32), kind)
        found = plain_min_max(self, wide, val_reduce_op, idx_reduce_op)

        def back(value: Any) -> Any:
            data = value.handle.data
            return self.to_tensor(narrow(data if value.shape else data[0]), tl.bfloat16)

        return (back(found[0]), found[1]) if isinstance(found, tuple) else back(found)

    return {
        (InterpreterBuilder, "binary_op"): binary_op,
        (InterpreterBuilder, "unary_op"): unary_op,
        (InterpreterBuilder, "ternary_op"): ternary_op,
        (InterpreterBuilder, "cast_impl"): cast_impl,
        (InterpreterBuilder, "create_fp_to_fp"): create_fp_to_fp,
        (InterpreterBuilder, "create_dot"): create_dot,
        (InterpreterBuilder, "create_fma"): create_fma,
        (ReduceOps, "sum"): reduce_sum,
        (ReduceOps, "min_max"): reduce_min_max,
    }


@contextmanager
def replaced(methods: dict[tuple[type, str], Callable[..., Any]]) -> Iterator[None]:
    """Classes of the interpreter with these methods, until the context closes."""
    before = {key: getattr(*key) for key in methods}
    try:
        for (cls, name), method in methods.items():
            setattr(cls, name, method)
        yield
    finally:
        for (cls, name), method in before.items():
            setattr(cls, name, method)


@contextmanager
def right_bf16() -> Iterator[None]:
    """bfloat16 computed as hardware computes it, in this context."""
    with replaced(_repairs()):
        yield
