"""Triton kernels.

Each file holds one operation, or a few small ones: the kernel, its table of launch configurations, the function that
launches it, and the torch reference that says what it must compute. The references are plain and slow;
tests compare the two.

House rules, which keep the kernels testable without a GPU and safe on one:

- arithmetic happens in fp32 or inside `tl.dot`, never in a 16-bit type;
- every masked load names what the masked-off lanes hold, and no value from outside a sequence's context reaches a sum:
  unused blocks and the tail of the last one may hold anything, NaN included;
- a grid depends on shapes alone, never on tensor contents, so that every launch can be captured in a CUDA graph;
- offsets into tensors that can pass 2^31 elements are computed in 64 bits.
"""
