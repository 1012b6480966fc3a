"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Hypothesis: moderate in `make test`; HYPOTHESIS_PROFILE=nightly hunts.
_QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
settings.register_profile("default", deadline=None, suppress_health_check=_QUIET)
settings.register_profile("nightly", deadline=None, max_examples=5000, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
