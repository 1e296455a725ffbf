# SPDX-License-Identifier: Apache-2.0
"""The gather kernel as Triton and NVIDIA's assembler make it for a Hopper GPU; it takes none to do so.

    python -m tests.unit.transfer.backends.cuda_ipc.gather_compiled

prints how wide the accesses of its two forms came out.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvferry.transfer.backends.cuda_ipc.kernel import gather
from kvferry.transfer.backends.cuda_ipc.settings import CudaIpcSettings

HOPPER = GPUTarget("cuda", 90, 32)


def assembly(aligned: bool) -> str:
    """The kernel's PTX. Raises what Triton raises if the assembler does not take it."""
    settings = CudaIpcSettings()
    source = ASTSource(
        fn=gather,
        signature={
            "table": "*i64",
            "num_spans": "i32",
            "ALIGNED": "constexpr",
            "BLOCK": "constexpr",
        },
        constexprs={"ALIGNED": aligned, "BLOCK": settings.block_words},
        attrs={(0,): [["tt.divisibility", 16]]},
    )
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": settings.num_warps})
    assert compiled.asm["cubin"]
    return str(compiled.asm["ptx"])


if __name__ == "__main__":
    for aligned in (True, False):
        print("wide" if ".v2.b64" in assembly(aligned) else "narrow", flush=True)
