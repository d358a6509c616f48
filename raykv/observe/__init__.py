"""What shows: metrics and dashboards."""
