"""What waits on a GPU for a kernel that waits for another rank, as a receive of NCCL does? Needs CuPy.

    python examples/benchmarks/on_a_gpu/waits.py

The kernel ends by itself after some seconds, so nothing here hangs. One process, one GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import cupy
import torch

SECONDS = 2.0
BLOCKS_OF_A_RECEIVE = 8
SOURCE = r"""
extern "C" __global__ void wait(long long nanoseconds) {
    long long now, begin;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - begin < nanoseconds);
}
"""


def main() -> None:
    kernel = cupy.RawKernel(SOURCE, "wait")
    kernel.compile()
    beside = torch.cuda.Stream()

    def begin_waiting(blocks: int, seconds: float) -> None:
        with cupy.cuda.ExternalStream(beside.cuda_stream):
            kernel((blocks,), (512,), (cupy.int64(int(seconds * 1e9)),))

    x = torch.randn(4096, 4096, device="cuda")
    (x @ x).sum().item()
    begin_waiting(1, 0.01)

    def tell(what: str, call: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        begin_waiting(BLOCKS_OF_A_RECEIVE, SECONDS)
        at = time.perf_counter()
        call()
        took = time.perf_counter() - at
        torch.cuda.synchronize()
        print(f"{'waits' if took > 0.7 * SECONDS else 'goes on'}: {what} ({took:.2f} s of {SECONDS})", flush=True)

    tell(".item() on the stream that computes", lambda: x.sum().item())
    tell("cudaMalloc of 1 GiB", lambda: torch.empty(2**30, dtype=torch.uint8, device="cuda"))
    kept = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    del kept
    tell("empty_cache(), which is cudaFree", torch.cuda.empty_cache)
    tell("64 MiB of pinned memory", lambda: torch.empty(2**26, dtype=torch.uint8, pin_memory=True))
    tell("a kernel that was never run before", lambda: torch.special.bessel_j1(x))
    tell("cuBLAS in another type for the first time", lambda: x.bfloat16() @ x.bfloat16())

    y = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def product_seconds(blocks: int) -> float:
        y @ y
        torch.cuda.synchronize()
        if blocks:
            begin_waiting(blocks, 1.5)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            y @ y
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    alone = product_seconds(0)
    for blocks in (4, 16, 32, 64, 128):
        share = product_seconds(blocks) / alone
        print(f"a product of matrices beside {blocks} waiting blocks takes {share:.2f} times as long")


if __name__ == "__main__":
    main()
