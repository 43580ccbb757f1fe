"""Figures that others published or that were measured in another run, for plots; never our own results.

Every block names its source. Times of another run hold for its clocks and inputs: only ratios inside one
block are used.
"""

from __future__ import annotations

from typing import NamedTuple

#: Dense bf16 matrix multiplication (8192 ** 3, cuBLAS) on one H200, TFLOP/s; measured on the H200 of PEERS.
MATMUL_TFLOPS_H200 = 786.0

PEERS_SOURCE = (
    "measured in another run on one H200 (141 GB, driver 580.159.04, CUDA 13.0, torch 2.11.0), 2026-11-30: "
    "batch 1, causal, bf16, 32/8 heads, head_dim 128, heavy-tailed inputs (5% hot key blocks, cold ones 8 to "
    "40 nats lower), CUDA-event medians"
)


class PeerTime(NamedTuple):
    """One time of another kernel.

    Attributes:
        kernel: its name.
        seqlen: tokens.
        sparsity: counted by that kernel; 0 = dense or nothing skipped.
        ms: milliseconds.
    """

    kernel: str
    seqlen: int
    sparsity: float
    ms: float


TRTLLM_SKIP = "TensorRT-LLM fmha_v2 skip-softmax"
TRTLLM_DENSE = "TensorRT-LLM fmha_v2 dense"
FLASH_ATTENTION_3 = "FlashAttention-3"
CUDNN_9_19 = "cuDNN 9.19 (torch SDPA)"

#: Source: PEERS_SOURCE.
PEERS = (
    PeerTime(CUDNN_9_19, 16384, 0.0, 3.320),
    PeerTime(FLASH_ATTENTION_3, 16384, 0.0, 2.840),
    PeerTime(TRTLLM_DENSE, 16384, 0.0, 3.586),
    PeerTime(TRTLLM_SKIP, 16384, 0.0, 4.449),
    PeerTime(TRTLLM_SKIP, 16384, 0.243, 3.782),
    PeerTime(TRTLLM_SKIP, 16384, 0.493, 3.210),
    PeerTime(TRTLLM_SKIP, 16384, 0.696, 2.696),
    PeerTime(TRTLLM_SKIP, 16384, 0.799, 2.529),
    PeerTime(TRTLLM_SKIP, 16384, 0.895, 2.176),
    PeerTime(CUDNN_9_19, 32768, 0.0, 14.754),
    PeerTime(FLASH_ATTENTION_3, 32768, 0.0, 12.774),
    PeerTime(TRTLLM_DENSE, 32768, 0.0, 15.723),
    PeerTime(TRTLLM_SKIP, 32768, 0.0, 17.073),
    PeerTime(TRTLLM_SKIP, 32768, 0.247, 15.153),
    PeerTime(TRTLLM_SKIP, 32768, 0.505, 12.664),
    PeerTime(TRTLLM_SKIP, 32768, 0.700, 11.079),
    PeerTime(TRTLLM_SKIP, 32768, 0.804, 10.243),
    PeerTime(TRTLLM_SKIP, 32768, 0.899, 9.450),
    PeerTime(CUDNN_9_19, 65536, 0.0, 57.855),
    PeerTime(FLASH_ATTENTION_3, 65536, 0.0, 52.298),
    PeerTime(TRTLLM_DENSE, 65536, 0.0, 62.342),
    PeerTime(TRTLLM_SKIP, 65536, 0.0, 67.641),
    PeerTime(TRTLLM_SKIP, 65536, 0.242, 60.568),
    PeerTime(TRTLLM_SKIP, 65536, 0.506, 51.615),
    PeerTime(TRTLLM_SKIP, 65536, 0.690, 45.246),
    PeerTime(TRTLLM_SKIP, 65536, 0.803, 40.867),
    PeerTime(TRTLLM_SKIP, 65536, 0.893, 37.744),
)

#: (sparsity, speed-up over the dense baseline that the paper names): H200, prefill, batch 1, 64K.
#: Source: BLASST, arXiv:2512.12087, figure of kernel speed-ups, transcribed.
PAPER_SEQLEN = 65536
PAPER_H200_PREFILL = (
    (0.0, 1.0),
    (0.238, 1.08),
    (0.492, 1.27),
    (0.573, 1.35),
    (0.710, 1.52),
    (0.795, 1.64),
    (0.885, 1.78),
    (0.920, 1.84),
)


def peer_ratios(kernel: str, seqlen: int) -> list[tuple[float, float]]:
    """(sparsity, speed-up over cuDNN) of a kernel of PEERS at one length, both of that run.

    Args:
        kernel: as in PEERS.
        seqlen: tokens; no entries = empty.
    """
    cudnn = {peer.seqlen: peer.ms for peer in PEERS if peer.kernel == CUDNN_9_19}
    return [(p.sparsity, cudnn[seqlen] / p.ms) for p in PEERS if (p.kernel, p.seqlen) == (kernel, seqlen)]


def roofline_tflops(sparsity: float) -> float:
    """Dense-equivalent TFLOP/s on an H200 if both products ran at the speed of matrix multiplication.

    Q.K^T always runs and P.V runs for kept tiles: (1 + (1 - s)) / 2 of the dense operations.

    Args:
        sparsity: skipped over visited tiles.
    """
    return 2.0 * MATMUL_TFLOPS_H200 / (2.0 - sparsity)
