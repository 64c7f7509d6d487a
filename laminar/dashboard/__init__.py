"""The dashboard: a page on a run's folder and, while it lives, its telemetry. It reads; who holds the token may control."""
