"""Tools that give evidence about Triton kernels on a machine without a GPU. See docs/kernels.md.

`checked` runs kernels in Triton's interpreter under a sanitizer; `sparse_empty` gives tensors of real sizes that take
no memory; `close_to_exact` is the tolerance rule. They need a process that set TRITON_INTERPRET=1 before any kernel
was imported (tests/kernels/interpreted runs in such processes).
"""

from tests.kernels.support.compare import bits_equal, close_to_exact
from tests.kernels.support.sanitizer import KernelFault, Report, checked
from tests.kernels.support.sparse import sparse_empty

__all__ = ["KernelFault", "Report", "bits_equal", "checked", "close_to_exact", "sparse_empty"]
