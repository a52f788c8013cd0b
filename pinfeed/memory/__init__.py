"""Memory limits, memory plans, free host memory, and reusable buffers."""
