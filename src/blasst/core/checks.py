"""Checks of user input: each names the argument, what came and what is wanted, before any work starts."""

from __future__ import annotations

import math
import numbers
import warnings

import torch
from torch import Tensor
from torch.autograd import forward_ad

from blasst.core.errors import UnsupportedError
from blasst.core.types import FP8

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Issue a UserWarning the first time a key is seen in this process."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, UserWarning, stacklevel=3)


def check_number(name: str, value: object, wanted: str = "a number") -> float:
    """A finite or infinite real number that is no bool and no NaN; not looked at while tracing."""
    if torch.compiler.is_compiling():
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), want {wanted}")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"{name}: got an integer beyond every float, want {wanted}") from error
    if math.isnan(number):
        raise ValueError(f"{name}: got nan, want {wanted}")
    return number


def check_threshold(name: str, value: object, batch: int, device: torch.device, limit: float) -> Tensor:
    """A threshold or scale factor as float32 (batch,) on the device.

    Floats and CPU tensors are checked for 0 <= value <= limit; values on another device are not read back.
    """

    def wanted() -> str:  # made only for an error: the compiler would take a size in a text for a fixed one
        return f"a float in [0, {limit:g}], or a float32 tensor ({batch},) of them on {device}"

    if isinstance(value, Tensor):
        if value.dtype != torch.float32:
            raise TypeError(f"{name}: got dtype {value.dtype}, want {wanted()}")
        if value.device != device:
            raise ValueError(f"{name}: got a tensor on {value.device}, want {wanted()}")
        # not "in (1, batch)": the compiler finds no symbolic size in a tuple
        if value.dim() > 1 or (value.dim() == 1 and value.shape[0] != 1 and value.shape[0] != batch):
            raise ValueError(f"{name}: got shape {tuple(value.shape)}, want {wanted()}")
        if device.type == "cpu" and not torch.compiler.is_compiling():
            _check_cpu_values(name, value, limit, wanted())
        return value.expand(batch)
    if torch.compiler.is_compiling():  # a product lets the compiler keep the float symbolic: no recompilation
        return torch.ones(batch, dtype=torch.float32, device=device) * value  # type: ignore[operator]
    number = check_number(name, value, wanted())
    if number < 0:
        hint = (
            "; a threshold is a linear ratio: convert a log-domain value with exp() first"
            if limit == 1
            else ""
        )
        raise ValueError(f"{name}: got {number!r}, want {wanted()}{hint}")
    if number > limit:
        hint = " (a value that grows with the length is threshold_scale_factor)" if limit == 1 else ""
        raise ValueError(f"{name}: got {number!r}, want {wanted()}{hint}")
    return torch.full((batch,), number, dtype=torch.float32, device=device)


def _check_cpu_values(name: str, value: Tensor, limit: float, wanted: str) -> None:
    if isinstance(value, torch._subclasses.FakeTensor):
        return
    bad = ~((value >= 0) & (value <= limit))
    if bool(bad.any()):
        first = value.expand(bad.shape)[bad][0].item()
        raise ValueError(f"{name}: got {first!r} in the tensor, want {wanted}")


#: A window this wide leaves out no key of any sequence; kernels add it to positions in 32 bits.
WIDE_WINDOW = 2**30


def check_window(window_size: object) -> tuple[int, int]:
    """(left, right), each an int >= -1; `WIDE_WINDOW` and more become -1, unlimited."""
    wanted = "two integers (left, right), -1 = unlimited"
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size: got {window_size!r}, want {wanted}")
    for side in window_size:
        if isinstance(side, bool) or not isinstance(side, int):
            raise TypeError(f"window_size: got {window_size!r}, want {wanted}")
        if side < -1:
            raise ValueError(f"window_size: got {window_size!r}, want {wanted}")
    left, right = (-1 if side >= WIDE_WINDOW else side for side in window_size)
    return left, right


def check_softcap(softcap: object) -> float:
    """A finite number >= 0."""
    number = check_number("softcap", softcap, "a finite number >= 0 (0 = none)")
    if not 0 <= number < math.inf:
        raise ValueError(f"softcap: got {number!r}, want a finite number >= 0 (0 = none)")
    return number


def check_softmax_scale(softmax_scale: object, head_dim: int, name: str = "softmax_scale") -> float:
    """A finite number; None = head_dim ** -0.5."""
    if softmax_scale is None:
        return head_dim**-0.5
    number = check_number(name, softmax_scale, "a finite number, or None")
    if math.isinf(number):
        raise ValueError(f"{name}: got {number!r}, want a finite number, or None")
    return number


def check_flag(name: str, value: object) -> bool:
    """True or False, and nothing that merely counts as one of them."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, want True or False")
    return value


def check_max_skipped_mass(value: object, has_threshold: bool) -> float | None:
    """An error budget in (0, 1); it limits a threshold, so there must be one."""
    if value is None:
        return None
    wanted = "a float in (0, 1), or None"
    number = check_number("max_skipped_mass", value, wanted)
    if not 0 < number < 1:
        raise ValueError(f"max_skipped_mass: got {number!r}, want {wanted}")
    if not has_threshold:
        raise ValueError(
            f"max_skipped_mass: got {number!r} without a threshold, want threshold= or "
            "threshold_scale_factor= beside it (threshold=1.0 leaves the choice to the budget)"
        )
    return number


def check_dense_tail(value: object) -> int:
    """A number of query rows; kernels add it to 32-bit row numbers."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"dense_tail: got {value!r}, want an integer >= 0")
    if value < 0:
        raise ValueError(f"dense_tail: got {value}, want an integer >= 0")
    return min(value, 2**30)


def check_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_dim: int,
    kv_dim: int,
    names: tuple[str, str, str],
    fp8: bool = False,
) -> None:
    """Types, dtypes, devices, ranks and head counts of q, k, v; with fp8, k and v may be float8_e4m3fn."""
    for name, tensor, dim in zip(names, (q, k, v), (q_dim, kv_dim, kv_dim), strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, want a tensor")
        if tensor.dim() != dim:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want {dim} dimensions")
    name_q, name_k, name_v = names
    dtype, like = (FP8, name_k) if fp8 and k.dtype == FP8 else (q.dtype, name_q)
    for name, tensor in ((name_k, k), (name_v, v)):
        if tensor.device != q.device:
            raise ValueError(f"{name}: got a tensor on {tensor.device}, want {q.device} like {name_q}")
        if fp8 and tensor.dtype.itemsize == 1 and tensor.dtype not in (FP8, q.dtype):
            raise UnsupportedError(f"{name}: got dtype {tensor.dtype}, supported are that of q and {FP8}")
        if tensor.dtype != dtype:
            raise ValueError(f"{name}: got dtype {tensor.dtype}, want {dtype} like {like}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"{name_v}: got shape {tuple(v.shape)}, want {tuple(k.shape[:-1])} + (head_dim_v,) like {name_k}"
        )
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"{name_q}, {name_v}: got head dims {q.shape[-1]}, {v.shape[-1]}, want at least 1")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{name_k}: got head_dim {k.shape[-1]}, want {q.shape[-1]} like {name_q}")
    if k.shape[-2] == 0 or q.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"{name_k}: got {k.shape[-2]} heads for {q.shape[-2]} query heads, want a divisor of them"
        )


def check_batch(k: Tensor, q: Tensor, names: tuple[str, str]) -> None:
    """Keys of as many sequences as queries."""
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"{names[0]}: got batch {k.shape[0]}, want {q.shape[0]} like {names[1]}")


def check_dtype(q: Tensor, impl: str, name: str = "q") -> None:
    """Only half, bfloat16 and float32 have kernels; the reference takes any floating dtype."""
    if not q.dtype.is_floating_point:
        raise TypeError(f"{name}: got dtype {q.dtype}, want float16, bfloat16 or float32")
    if q.dtype not in SUPPORTED_DTYPES and impl != "reference":
        raise UnsupportedError(
            f"{name}: got dtype {q.dtype}, supported are float16, bfloat16 and float32 "
            "(impl='reference' takes any floating dtype)"
        )


def check_index(name: str, value: object, shape: tuple[int | None, ...], device: torch.device) -> Tensor:
    """An int32 tensor of a shape (None = any size) on the device."""

    def wanted() -> str:
        return f"an int32 tensor {tuple('any' if s is None else s for s in shape)} on {device}"

    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, want {wanted()}")
    if value.dtype != torch.int32:
        raise TypeError(f"{name}: got dtype {value.dtype}, want {wanted()}")
    if value.device != device:
        raise ValueError(f"{name}: got a tensor on {value.device}, want {wanted()}")
    right = value.dim() == len(shape) and all(
        w is None or w == got for w, got in zip(shape, value.shape, strict=True)
    )
    if not right:
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, want {wanted()}")
    return value


def check_sinks(sinks: object, num_heads: int, device: torch.device) -> Tensor | None:
    """Floating (num_heads,) on the device, as float32."""
    if sinks is None:
        return None

    def wanted() -> str:
        return f"a floating tensor ({num_heads},) on {device}"

    if not isinstance(sinks, Tensor) or not sinks.dtype.is_floating_point:
        raise TypeError(f"sinks: got {getattr(sinks, 'dtype', type(sinks).__name__)}, want {wanted()}")
    if tuple(sinks.shape) != (num_heads,):
        raise ValueError(f"sinks: got shape {tuple(sinks.shape)}, want {wanted()}")
    if sinks.device != device:
        raise ValueError(f"sinks: got a tensor on {sinks.device}, want {wanted()}")
    if readable(sinks) and not bool((sinks < math.inf).all()):
        raise ValueError(f"sinks: got {sinks.tolist()[:8]}, want numbers below inf (-inf = no sink)")
    return sinks.float()


def check_descale(name: str, value: object, batch: int, num_kv_heads: int, cache: Tensor) -> Tensor | None:
    """The scale of an fp8 cache as float32 (batch, num_kv_heads) on its device; None = 1.

    Floats and CPU tensors are checked for 0 < value < inf; values on another device are not read back.
    """
    if value is None:
        return None
    if cache.dtype != FP8:
        raise ValueError(f"{name}: got a scale beside a cache of {cache.dtype}, want None unless it is {FP8}")
    shape = (batch, num_kv_heads)

    def wanted() -> str:
        return f"a positive float, or a float32 tensor (), ({num_kv_heads},) or {shape} on {cache.device}"

    if isinstance(value, Tensor):
        if value.dtype != torch.float32:
            raise TypeError(f"{name}: got dtype {value.dtype}, want {wanted()}")
        if value.device != cache.device:
            raise ValueError(f"{name}: got a tensor on {value.device}, want {wanted()}")
        if all(tuple(value.shape) != one for one in ((), shape[1:], shape)):  # see check_threshold
            raise ValueError(f"{name}: got shape {tuple(value.shape)}, want {wanted()}")
        if readable(value) and not bool(((value > 0) & (value < math.inf)).all()):
            raise ValueError(f"{name}: got {value.flatten().tolist()[:8]}, want {wanted()}")
        return value.expand(shape)
    if torch.compiler.is_compiling():  # as in check_threshold
        return torch.ones(shape, dtype=torch.float32, device=cache.device) * value  # type: ignore[operator]
    number = check_number(name, value, wanted())
    limits = torch.finfo(torch.float32)
    if not limits.tiny <= number <= limits.max:
        raise ValueError(f"{name}: got {number!r}, want {wanted()}")
    return torch.full((), number, dtype=torch.float32, device=cache.device).expand(shape)


def check_no_grad(*tensors: Tensor | None) -> None:
    """There are no derivatives: say so at the call instead of returning a detached output."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise NotImplementedError(
            "blasst has no backward pass: got an input with requires_grad=True while gradients are enabled; "
            "call under torch.no_grad() or torch.inference_mode()"
        )
    if torch.compiler.is_compiling():
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError("blasst has no forward-mode derivative: got an input with a tangent")


def readable(tensor: Tensor | None) -> bool:
    """Whether values may be looked at without a device sync: a real CPU tensor outside tracing."""
    return (
        tensor is not None
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not isinstance(tensor, torch._subclasses.FakeTensor)
    )


def check_lengths(name: str, lengths: Tensor | None, low: int, high: int) -> None:
    """Each length in [low, high]; only where values are readable without a sync."""
    if lengths is None or not readable(lengths) or lengths.numel() == 0:
        return
    smallest, largest = int(lengths.min()), int(lengths.max())
    if smallest < low or largest > high:
        raise ValueError(f"{name}: got values in [{smallest}, {largest}], want [{low}, {high}]")


def check_used_keys(seqused_k: Tensor, cu_seqlens_k: Tensor) -> None:
    """Keys in use of a packed sequence are its own: more of them would be the next sequence's."""
    if not readable(seqused_k) or not readable(cu_seqlens_k):
        return
    lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    if bool((seqused_k > lengths).any()):
        at = int((seqused_k > lengths).nonzero()[0])
        raise ValueError(
            f"seqused_k: got {int(seqused_k[at])} for sequence {at}, want at most its {int(lengths[at])} keys"
        )


def check_pages(block_table: Tensor, lengths: Tensor, first: Tensor | None, cache: Tensor) -> None:
    """Every page that a sequence needs is in the cache; other entries of the table are not looked at.

    Args:
        block_table: int32 (batch, max_pages).
        lengths: int32 (batch,) slots in use.
        first: int32 (batch,) first slot that exists, or None = 0.
        cache: (num_pages, page_size, ...).
    """
    if not all(readable(t) for t in (block_table, lengths)) or not (first is None or readable(first)):
        return
    begin = torch.arange(block_table.shape[1]) * cache.shape[1]
    needed = begin < lengths[:, None]
    if first is not None:
        needed &= begin + cache.shape[1] > first[:, None]
    bad = needed & ((block_table < 0) | (block_table >= cache.shape[0]))
    if bool(bad.any()):
        sequence, column = bad.nonzero()[0].tolist()
        raise ValueError(
            f"block_table: got page {int(block_table[sequence, column])} at [{sequence}, {column}], which "
            f"sequence {sequence} needs for its {int(lengths[sequence])} slots, "
            f"want [0, {cache.shape[0] - 1}]"
        )


def check_cu_seqlens(name: str, cu_seqlens: Tensor, total: int | None, longest: int, name_max: str) -> None:
    """Starts at 0, does not fall, ends within the packed tensor, no sequence above the stated maximum."""
    if not readable(cu_seqlens):
        return
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    if int(cu_seqlens[0]) != 0 or bool((lengths < 0).any()):
        raise ValueError(f"{name}: got {cu_seqlens.tolist()[:8]}, want it to start at 0 and never to fall")
    if total is not None and int(cu_seqlens[-1]) > total:
        raise ValueError(
            f"{name}: got {int(cu_seqlens[-1])} tokens, want at most {total} in the packed tensor"
        )
    if lengths.numel() and int(lengths.max()) > longest:
        raise ValueError(
            f"{name_max}: got {longest}, want at least {int(lengths.max())}, the longest sequence"
        )
