"""What operators see and do: admin routes, forwarded routes, the dashboard."""
