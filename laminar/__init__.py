"""The ground floor: types, policies, config, data module, cluster, telemetry. Imports no torch."""
