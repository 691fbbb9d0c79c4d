"""The SDK: sandboxes from Python, over the local gateway's socket or to a remote endpoint."""
