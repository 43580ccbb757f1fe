"""Settings of the whole suite: no deadlines (shared machines), the same examples in every CI run.

The profile "mutants" is for tests/mutants: always the same examples, and the first failure is enough.
"""

import os

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "blasst",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "mutants", settings.get_profile("blasst"), derandomize=True, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("blasst")


def pytest_collection_modifyitems(items):
    """What is marked as long comes first."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
