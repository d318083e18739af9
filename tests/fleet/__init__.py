"""Metrics of runs for Prometheus and Grafana."""
