"""K8E's name and place of the Python SDK, which is :mod:`k8e`.

    PYTHONPATH=sdk/python python -c "from sandbox_client import SandboxClient, sandbox_session"

Where k8e is installed, this file is not needed: the module ``sandbox_client`` comes with it. In a
checkout, this finds the package beside it. For stubs of the gRPC interface, do as K8E says:

    python -m grpc_tools.protoc -I proto --python_out=sdk/python --grpc_python_out=sdk/python \
        proto/sandbox/v1/sandbox.proto
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("k8e") is None:
    sys.path.append(str(Path(__file__).resolve().parents[2] / "src"))

from k8e import ExecResult, SandboxClient, sandbox_session

__all__ = ["ExecResult", "SandboxClient", "sandbox_session"]
