"""Other methods that choose key tiles, one per file, from their papers: alone, or with blasst inside.

Each gives a block mask for `block_mask=` of the public functions. They import nothing but `blasst.core`.
"""

from blasst.selectors.flexprefill import FlexPrefill
from blasst.selectors.h2o import H2O
from blasst.selectors.minference import MInference
from blasst.selectors.quest import Quest
from blasst.selectors.rocketkv import RocketKV
from blasst.selectors.selector import DecodeSelector, PrefillSelector, mask_sparsity, reach_sparsity
from blasst.selectors.snapkv import SnapKV
from blasst.selectors.spargeattention import SpargeAttention
from blasst.selectors.xattention import XAttention

__all__ = [
    "DecodeSelector",
    "FlexPrefill",
    "H2O",
    "MInference",
    "PrefillSelector",
    "Quest",
    "RocketKV",
    "SnapKV",
    "SpargeAttention",
    "XAttention",
    "mask_sparsity",
    "reach_sparsity",
]
