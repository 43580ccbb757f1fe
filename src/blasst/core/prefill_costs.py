"""What prefill should cost by the rule and by `screen="int8"`, from the counts of a profile alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from blasst.core.errors import ProfileError
from blasst.core.profile import Profile


@dataclass(frozen=True)
class PrefillCosts:
    """Arithmetic of a prefill in units of one 16-bit Q.K^T over the visited tiles; dense is 2.

    Both ways are taken at the same threshold: there they promise the same for every skipped key, and the
    tiles of `screen="int8"` are a part of those that go against the final maximum. At the same sparsity, in
    contrast, counts do not say which of them loses more.

    Attributes:
        threshold: at which both were looked up.
        sparsity: what the rule skips there.
        screened_sparsity: what `screen="int8"` skips there: the target that gives it this threshold.
    """

    threshold: float
    sparsity: float
    screened_sparsity: float

    @property
    def fused(self) -> float:
        """The rule in one pass: Q.K^T of every tile, P.V of those that are kept."""
        return 1.0 + (1.0 - self.sparsity)

    @property
    def screened(self) -> float:
        """8-bit Q.K^T of every tile at twice the rate, then both products of those that are kept."""
        return 0.5 + 2.0 * (1.0 - self.screened_sparsity)

    @property
    def screen(self) -> str | None:
        """The `screen=` of the cheaper way."""
        return "int8" if self.screened < self.fused else None


def prefill_costs(profile: Profile, target_sparsity: float, kv_len: float) -> PrefillCosts:
    """Costs of both ways at the threshold with which the rule reaches a target.

    It counts arithmetic and knows nothing of kernels, of which none makes `screen="int8"` faster yet; so it
    is there to be asked, and nothing in this library follows it.

    Args:
        profile: with prefill counted in both ways.
        target_sparsity: of the rule, in [0, 1].
        kv_len: keys of the sequence.

    Raises:
        ProfileError: prefill was not counted in both ways, or with unlike dense tails.
        ValueError: the target is not in [0, 1], or kv_len is not finite.
    """
    if not math.isfinite(kv_len):
        raise ValueError(f"kv_len: got {kv_len}, want a number of keys")
    both = (profile, profile.for_screen("int8"))
    tails = [way.phase_fit("prefill").dense_tail for way in both]
    if tails[0] != tails[1]:
        raise ProfileError(f"dense_tail: found {tails[0]} and {tails[1]}, wanted the same for both ways")
    threshold = profile.threshold("prefill", target_sparsity, kv_len)
    return PrefillCosts(
        threshold, *(way.phase_fit("prefill").predicted_sparsity(threshold, kv_len) for way in both)
    )
