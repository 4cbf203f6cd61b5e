"""The client's end of TLS, without a socket: what to send for what is said, and what is said in what came.

Sockets that `ssl` wraps may not be read and written by two threads at once; bytes may.
"""

from __future__ import annotations

import socket
import ssl

_READ_BYTES = 256 * 1024
_WRONG_VERSION = "WRONG_VERSION_NUMBER"  # what came is no TLS at all


class TlsStream:
    """Called by one thread at a time."""

    def __init__(self, context: ssl.SSLContext, server_name: str) -> None:
        self.is_ended = False  # the server said that nothing more will come
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=server_name)

    def shake_hands(self, dialed: socket.socket) -> None:
        """On a socket that blocks, for its timeout at the most. Raises OSError, also if the server is not trusted."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._send_all(dialed)
                data = dialed.recv(_READ_BYTES)
                if not data:
                    raise ConnectionResetError("the server hung up during the TLS handshake") from None
                self._in.write(data)
            except ssl.SSLError as error:
                self._send_all(dialed)  # the other end is to know why
                raise OSError(tls_error_text(error)) from error
            else:
                self._send_all(dialed)
                return

    def seal(self, data: bytes) -> bytes:
        """What to send for it."""
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        return self._out.read()

    def unseal(self, data: bytes) -> bytes:
        """What is said in what came, as far as it is whole. There may be something to send: `to_send`."""
        self._in.write(data)
        said = []
        try:
            while piece := self._tls.read(_READ_BYTES):
                said.append(piece)
            self.is_ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.is_ended = True
        except ssl.SSLError as error:
            raise OSError(tls_error_text(error)) from error
        return b"".join(said)

    def to_send(self) -> bytes:
        return self._out.read()

    def _send_all(self, dialed: socket.socket) -> None:
        data = self._out.read()
        if data:
            dialed.sendall(data)


def tls_error_text(error: Exception) -> str:
    """With what to do about it, where that is known."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its TLS certificate is not trusted: {error.verify_message}; give its CA: TlsSettings(ca_file=…)"
    if isinstance(error, ssl.SSLError) and error.reason == _WRONG_VERSION:
        return "it does not talk TLS; use inturn:// instead of inturns://"
    if isinstance(error, ssl.SSLError) and error.reason and "CERTIFICATE" in error.reason:
        return f"TLS: {error.reason}; does it ask for a client certificate? TlsSettings(cert_file=…, key_file=…)"
    return f"TLS: {error}" if isinstance(error, ssl.SSLError) else str(error)
