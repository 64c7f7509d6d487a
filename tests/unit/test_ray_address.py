"""A Ray cluster's address that cannot be one is a setting to mend, not a traceback."""

import pytest

from laminar.cluster.ray_cluster import RayCluster
from laminar.errors import ConfigError


@pytest.mark.parametrize("address", ["garbage", "10.0.0.1", "127.0.0.1:notaport"])
def test_what_is_no_address_is_refused_with_the_setting(address, tmp_path, monkeypatch):
    for name in ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_worker_niceness"):
        monkeypatch.setenv(name, "0")  # which it sets: given back afterwards
    with pytest.raises(ConfigError, match=f"cluster.ray_address '{address}' is no address"):
        RayCluster(address, 1, "r", tmp_path)
