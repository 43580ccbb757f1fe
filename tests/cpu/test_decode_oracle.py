"""The decode rule of the device tests, all sequences and tiles at once, against the reference."""

import pytest
import torch
from decode_oracle import decode_truth
from test_hopper_batches import CONFIGURATIONS, Batch, numbers_of, run

from blasst.core.reference import reference_attention


@pytest.mark.parametrize("number", range(0, 9000, 373))
def test_the_rule_for_a_whole_batch_is_the_reference(number):
    batch = Batch(number, "cpu", longest=900)
    arguments = dict(zip("kv", batch.caches)) | dict(zip(("k_descale", "v_descale"), batch.descale))
    arguments |= {"q": batch.q, "seqused_k": batch.lengths, "block_table": batch.table}
    arguments |= {"threshold": batch.threshold, "phase": "decode", **batch.options}
    if batch.table is None:
        arguments["leftpad_k"] = batch.pads
    want = reference_attention(**arguments)
    at = torch.as_tensor(batch.threshold).expand(len(batch.lengths))
    got = decode_truth(batch.scores(), at)
    tiles = got.kept.shape[-1]
    assert torch.equal(got.kept, want.kept_tiles[:, :, 0, :tiles])
    assert not bool(want.kept_tiles[..., tiles:].any())
    assert torch.equal(got.visited[:, None].expand_as(want.counts.visited), want.counts.visited)
    for name in ("out", "lse", "skipped_mass"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-9, atol=1e-12)
    followed = decode_truth(batch.scores(), None, got.kept)
    assert torch.equal(followed.out, got.out)


def test_every_batch_belongs_to_one_worker_and_each_works_on_few_configurations():
    parts = [numbers_of(worker, 13, 1000) for worker in range(13)]
    assert sorted(n for part in parts for n in part) == list(range(1000))
    assert max(len({n % len(CONFIGURATIONS) for n in part}) for part in parts) <= 5


def test_the_checks_of_the_device_run_pass_on_another_kernel_and_see_a_wrong_one(monkeypatch):
    run(list(range(0, 600, 7)), "cpu", "eager", longest=500)
    plain = Batch.call
    for field, wrong in (("out", 1.02), ("lse", 1.01)):

        def call(self, *given, _field=field, _wrong=wrong, **more):
            got = plain(self, *given, **more)
            return got._replace(**{_field: getattr(got, _field) * _wrong})

        monkeypatch.setattr(Batch, "call", call)
        with pytest.raises(AssertionError, match=f"batch .*: {field}"):
            run(list(range(0, 60, 7)), "cpu", "eager", longest=500)
