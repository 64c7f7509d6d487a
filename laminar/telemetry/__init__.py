"""Metrics: declared once, carried by a bounded stream, written by the observer."""
