"""Memory limits and plans, what is free on the host, and reusable buffers."""
