"""The emulator of tests/emulator notices what a kernel must not do: faults planted in the kernels' texts."""

import pytest
import torch
from hopper_emulator import EmulatorError
from run_hopper import emulated
from translate import UnknownInstruction, translate

from blasst import blasst_attn_func, blasst_attn_with_kvcache
from blasst.testing import heavy_tailed_inputs


def prefill():
    x = heavy_tailed_inputs(1, 300, 1500, 2, 1, 64, dtype=torch.float16, block=128)
    return blasst_attn_func(*x, causal=True, threshold=0.05, return_lse=True, impl="hopper")


def decode():
    x = heavy_tailed_inputs(2, 1, 1500, 8, 2, 64, dtype=torch.float16, block=64)
    return blasst_attn_with_kvcache(*x, threshold=0.05, return_lse=True, impl="hopper")


def with_fault(call, file, old, new, seed=0, **options):
    """What a call gives when a text of the kernel is another one."""

    def edit(name, text):
        if name != file:
            return text
        assert old in text, f"{file} has changed: plant this fault anew"
        return text.replace(old, new)

    with emulated(seed, edit=edit, **options):
        return call()


#: What must be said of it -> (call, file, text, what stands for it).
NOTICED = {
    r"deadlock: (.|\n)*warp 1 lanes 0 to 31: mbarrier .* \(\d of 8 arrivals .*\) at .*prefill\.cu:": (
        prefill,
        "prefill.cu",
        "        release(&shared.barriers.value_empty[ring.stage]);\n        ring.next();",
        "        ring.next();",
    ),
    r"deadlock: (.|\n)*named barrier 3 \(128 of 256 threads are there\)": (
        prefill,
        "prefill.cu",
        "if (TURNS) named_arrive(kTurnBarrier + 1 - w, 256);",
        "",
    ),
    r"deadlock: (.|\n)* -16 bytes are missing": (
        prefill,
        "prefill.cu",
        "barrier_expect(barrier, kChunks * kChunkBytes);",
        "barrier_expect(barrier, kChunks * kChunkBytes - 16);",
    ),
    r"one arrival more than the 1 of a phase .* at .*prefill\.cu:": (
        prefill,
        "prefill.cu",
        "            barrier_wait(shared_address(&barriers.key_empty[ring.stage]), ring.phase ^ 1);\n",
        "",
    ),
    r"the warps want 66560 registers": (
        prefill,
        "prefill.cu",
        "kConsumerRegisters = 240",
        "kConsumerRegisters = 248",
    ),
    r"lanes of a warp meet at different calls: .* __shfl_xor_sync": (
        prefill,
        "prefill.cu",
        "    x = max_or_nan(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));\n",
        "    if (threadIdx.x % 32 < 16) x = max_or_nan(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));\n",
    ),
    r"wgmma of warp \d reads .* with no fence\.proxy\.async after it": (
        decode,
        "decode.cu",
        "        async_proxy_fence();\n        ++issued;",
        "        ++issued;",
    ),
    r"ended with wgmma of warp \d under way": (
        decode,
        "decode.cu",
        "        wgmma_commit();\n        wgmma_wait<0>();\n#pragma unroll\n        for (int chunk",
        "        wgmma_commit();\n#pragma unroll\n        for (int chunk",
    ),
    r"counters are not zero again": (
        decode,
        "decode.cu",
        "p.messages[job.head(p) * words + i] = 0;",
        ";",
    ),
}


@pytest.mark.parametrize("said", NOTICED, ids=[str(i) for i in range(len(NOTICED))])
def test_a_planted_fault_is_named(said):
    with pytest.raises((EmulatorError, AssertionError), match=said):
        with_fault(*NOTICED[said])


def test_a_missing_wait_shows_as_nan():
    got = with_fault(
        prefill,
        "prefill.cu",
        "            decide(next_word, next);\n            wgmma_wait<0>();",
        "            decide(next_word, next);\n            wgmma_wait<1>();",
    )
    assert bool(got.out.isnan().any())


def test_keys_given_back_too_early_show_in_some_order():
    wait, release = "wgmma_wait<1>();\n            pin(next);", "release_operands(next_word, after);"
    between = "\n            "
    fault = prefill, "prefill.cu", f"{wait}{between}{release}", f"{release}{between}{wait}"
    seeds = [seed for seed in range(8) if bool(with_fault(*fault, seed=seed, processors=1).out.isnan().any())]
    assert seeds and 0 not in seeds  # in the plain order nobody takes them meanwhile


def test_a_wrong_swizzle_changes_the_output():
    with emulated():
        want = decode()
    got = with_fault(
        decode,
        "decode.cu",
        "kQueryChunkBytes + ((piece % 8) ^ (r % 8)) * 16",
        "kQueryChunkBytes + (piece % 8) * 16",
    )
    assert float((got.out - want.out).abs().max()) > 0.1


def test_an_unknown_instruction_is_refused():
    with pytest.raises(UnknownInstruction, match=r"mma\.sync"):
        translate('void f() { asm volatile("mma.sync %0;" : "=r"(x) : : "memory"); }')
    with pytest.raises(ValueError, match="__shared__"):
        translate("__shared__ int x[4];")
