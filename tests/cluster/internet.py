"""The internet of a LAN: a DNS server, and a web server on each of two addresses."""

from __future__ import annotations

import http.server
import socket
import sys
import threading

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

NAMES = {"allowed.example.": "203.0.113.10", "other.example.": "203.0.113.11"}
LIFETIME = 5


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = str(self.connection.getsockname()[0]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its base says so
        pass


def answer(data: bytes) -> bytes:
    query = dns.message.from_wire(data)
    response = dns.message.make_response(query)
    response.flags |= dns.flags.RA
    question = query.question[0]
    address = NAMES.get(question.name.to_text().lower())
    if address is None:
        response.set_rcode(dns.rcode.NXDOMAIN)
    elif question.rdtype == dns.rdatatype.A:
        response.answer.append(dns.rrset.from_text(question.name, LIFETIME, "IN", "A", address))
    return response.to_wire()


def main() -> None:
    for address in NAMES.values():
        server = http.server.ThreadingHTTPServer((address, 80), Page)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind((sys.argv[1], 53))
        print("ready", flush=True)
        while True:
            data, caller = listener.recvfrom(4096)
            listener.sendto(answer(data), caller)


if __name__ == "__main__":
    main()
