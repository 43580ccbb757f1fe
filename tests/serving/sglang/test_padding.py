"""Steps that SGLang fills up with rows of its own, and what a layer hands to the backend beside q, k, v."""

from __future__ import annotations

import json
from pathlib import Path

from serving_parts import cases_of
from sglang_parts import environment

#: Runs one layer of the backend on a step as it is, and on the same step after SGLang's own padding.
STEPS = """
import json, sys, torch
from types import SimpleNamespace

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from blasst.integrations.serving_options import ServingOptions
from blasst.integrations.sglang_backend import BlasstAttnBackend, layer_options

torch.manual_seed(0)
PAGE, HEADS, KV_HEADS, DIM = 4, 2, 1, 64
LENGTHS = [330, 700, 20]  # keys of each request, with the new ones
layer = RadixAttention(HEADS, DIM, 0.1, KV_HEADS, 0)
table = torch.zeros(4, 1024, dtype=torch.int32)
first = PAGE  # slots 0 to 3 are SGLang's place for rows of padding
for row, length in enumerate(LENGTHS, 1):
    table[row, :length] = torch.arange(first, first + length)
    first += -(-length // PAGE) * PAGE
keys, values = torch.randn(first, KV_HEADS, DIM) * 3, torch.randn(first, KV_HEADS, DIM)
for row, length in enumerate(LENGTHS, 1):
    keys[table[row, 64 : max(length - 128, 64)].long()] *= 0.01  # weak in the middle: tiles to skip
keys[:PAGE], values[:PAGE] = float("nan"), float("nan")
pool = SimpleNamespace(get_key_buffer=lambda _: keys, get_value_buffer=lambda _: values)


def backend():
    made = object.__new__(BlasstAttnBackend)
    made.rules = ServingOptions.read().rules(None, 4096)
    made.req_to_token_pool = SimpleNamespace(req_to_token=table)
    made.token_to_kv_pool, made.page_size, made.step = pool, PAGE, None
    made.layer_options = {0: layer_options("layers.0", layer, "eager")}
    made.counts = {}
    add = lambda phase, tiles: made.counts.setdefault(phase, []).append(
        [int(tiles.skipped.sum()), int(tiles.visited.sum())]
    )
    made.meter = SimpleNamespace(add=add)
    return made


def batch(mode, new):
    rows = sum(new)
    made = ForwardBatch(
        forward_mode=ForwardMode[mode],
        batch_size=len(LENGTHS),
        input_ids=torch.zeros(rows, dtype=torch.long),
        req_pool_indices=torch.arange(1, len(LENGTHS) + 1),
        seq_lens=torch.tensor(LENGTHS),
        out_cache_loc=torch.zeros(rows, dtype=torch.long),
        seq_lens_sum=sum(LENGTHS),
    )
    made.seq_lens_cpu = torch.tensor(LENGTHS)
    made.positions = torch.zeros(rows, dtype=torch.long)
    if mode == "EXTEND":
        made.extend_seq_lens, made.extend_seq_lens_cpu = torch.tensor(new, dtype=torch.int32), list(new)
        made.extend_prefix_lens_cpu = [length - n for length, n in zip(LENGTHS, new)]
    return made


def run(step, q):
    used = backend()
    used.init_forward_metadata(step)
    return used.forward_extend(q, None, None, layer, step), used.counts


cases = json.load(open(sys.argv[1]))
for name in ("DECODE", "EXTEND"):
    new = cases[name]
    rows = sum(new)
    q = torch.randn(rows + 3, HEADS * DIM)
    wanted, counts = run(batch(name, new), q[:rows])
    padded = batch(name, new)
    padded._original_batch_size = padded.batch_size
    if name == "DECODE":
        padded.batch_size = rows + 3
    padded._pad_inputs_to_size(SimpleNamespace(attn_backend=backend()), rows + 3, padded.batch_size)
    assert padded.seq_lens.shape[0] == padded.batch_size and padded.input_ids.shape[0] == rows + 3
    out, counted = run(padded, q)
    skipped, visited = map(sum, zip(*(pair for pairs in counts.values() for pair in pairs)))
    said = {
        "same rows": torch.equal(out[:rows], wanted),
        "other rows": out[rows:].abs().max().item(),
        "same counts": counted == counts,
        "skips": 0 < skipped < visited,
    }
    print("CASE", json.dumps([name, json.dumps(said)]))

used = backend()
for name, value in {"tensor": torch.ones(2), "none": None, "false": False, "true": True}.items():
    try:
        step = batch("DECODE", [1, 1, 1])
        used.init_forward_metadata(step)
        used.forward_decode(torch.zeros(3, HEADS * DIM), None, None, layer, step, mask=value)
        said = "served"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print("CASE", json.dumps([name, said]))
"""


def test_rows_of_padding_are_neither_attended_nor_counted(tmp_path: Path) -> None:
    steps = {"DECODE": [1, 1, 1], "EXTEND": [64, 70, 1]}
    said = cases_of(STEPS, steps, tmp_path, tmp_path, environment(BLASST_THRESHOLD="0.3"))
    for name in steps:
        assert json.loads(said[name]) == {
            "same rows": True,
            "other rows": 0.0,
            "same counts": True,
            "skips": True,
        }
    # a layer that hands over more than q, k and v is refused, also where that is a tensor
    refused = "UnsupportedError: blasst: attention with mask is not served"
    assert {name: said[name] for name in ("tensor", "none", "false", "true")} == {
        "tensor": refused,
        "none": "served",
        "false": "served",
        "true": refused,
    }
