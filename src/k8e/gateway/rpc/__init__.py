"""The gRPC endpoint: K8E's calls and the stream of remote SDKs."""
