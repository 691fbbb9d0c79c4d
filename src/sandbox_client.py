"""K8E's name for the Python SDK: programs that were written for K8E run as they are.

from sandbox_client import SandboxClient, sandbox_session
"""

from k8e import ExecResult, SandboxClient, sandbox_session

__all__ = ["ExecResult", "SandboxClient", "sandbox_session"]
