"""Sessions: sandboxes handed to tenants, with limits and lifetimes, kept over restarts."""
