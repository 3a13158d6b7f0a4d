"""Workloads: sessions that follow from a plan and its seed."""
