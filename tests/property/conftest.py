"""How many random schedules: HYPOTHESIS_PROFILE=quick|ci|deep. The default is what CI runs."""

import os

from hypothesis import HealthCheck, settings

for _name, _max_examples in (("quick", 100), ("ci", 1_000), ("deep", 20_000)):
    settings.register_profile(
        _name, max_examples=_max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
