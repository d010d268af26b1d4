"""What must be in place before any test module is imported."""

import os

# Triton reads it when it is first imported: kernels run in its interpreter, without a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
