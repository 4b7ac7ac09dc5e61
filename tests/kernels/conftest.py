"""Tests in interpreted/ need a process in which kernels were imported with TRITON_INTERPRET=1.

`test_kernels_interpreted.py` starts one for each file, so that the rest of the suite is not influenced. By hand:
``TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted --confcutdir tests/kernels/interpreted``.
"""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
