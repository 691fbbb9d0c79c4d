"""libnftables by ctypes: one transaction per call, in the namespace of the calling thread."""

from __future__ import annotations

import ctypes
import ctypes.util

from k8e import errors

JSON, HANDLES = 1 << 4, 1 << 3  # output flags of libnftables


class NftFailed(errors.K8eError):
    """The kernel or libnftables refused a change; nothing of it was applied."""

    code = "nft_failed"


class Nftables:
    """A context of libnftables. Not for use by two threads."""

    def __init__(self) -> None:
        name = ctypes.util.find_library("nftables") or "libnftables.so.1"
        try:
            self._lib = ctypes.CDLL(name)
        except OSError as error:
            raise errors.RuntimeUnusable(
                f"libnftables cannot be loaded: {error}", hint="run install.sh again"
            ) from None
        self._lib.nft_ctx_new.restype = ctypes.c_void_p
        for call in ("nft_ctx_get_output_buffer", "nft_ctx_get_error_buffer"):
            getattr(self._lib, call).restype = ctypes.c_char_p
        self._context = ctypes.c_void_p(self._lib.nft_ctx_new(0))
        self._lib.nft_ctx_buffer_output(self._context)
        self._lib.nft_ctx_buffer_error(self._context)

    def run(self, commands: str) -> str:
        """Apply all of ``commands`` or nothing; what they print."""
        status = self._lib.nft_run_cmd_from_buffer(self._context, commands.encode())
        output = self._lib.nft_ctx_get_output_buffer(self._context).decode()
        error = self._lib.nft_ctx_get_error_buffer(self._context).decode()
        if status:
            raise NftFailed(f"nftables refused a change: {' '.join(error.split())[:500]}")
        return output

    def run_json(self, command: str) -> str:
        """What a listing says, as JSON and with handles."""
        self._lib.nft_ctx_output_set_flags(self._context, JSON | HANDLES)
        try:
            return self.run(command)
        finally:
            self._lib.nft_ctx_output_set_flags(self._context, 0)

    def close(self) -> None:
        self._lib.nft_ctx_free(self._context)
