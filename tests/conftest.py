"""Settings of the whole suite: no deadlines (shared machines), the same examples in every CI run."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "blasst",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("blasst")
