"""The machine that runs these tests has what they need; without it they would all say nothing."""

from __future__ import annotations

import torch

from blasst.report.doctor import examine


def test_a_hopper_gpu_and_the_compilers_are_there() -> None:
    assert torch.cuda.is_available()
    states = {finding.name: (finding.state, finding.detail) for finding in examine("")}
    for part in ("GPU", "triton kernels", "hopper kernels"):
        assert states[part][0] == "ok", states[part][1]
