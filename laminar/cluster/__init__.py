"""Ray: role specs, placement, the supervisor and what ends leftovers."""
