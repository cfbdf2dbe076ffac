"""Certificates for tests, made with the `openssl` command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from treeserve_wire.tls import TlsFiles

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@dataclass(frozen=True)
class Authority:
    """A CA; `certificate` and `key` are its files."""

    certificate: Path
    key: Path

    @classmethod
    def make(cls, folder: Path, name: str = "ca") -> Authority:
        """A new one, in files of this name."""
        made = cls(folder / f"{name}.crt", folder / f"{name}.key")
        out = ("-keyout", made.key, "-out", made.certificate)
        _openssl("req", "-x509", *_KEY, "-days", 2, "-subj", f"/CN={name}", *out)
        return made

    def issue(self, folder: Path, names: str = "DNS:localhost,IP:127.0.0.1", days: int = 1) -> TlsFiles:
        """A certificate of these names in `folder`, over what is there; negative days have passed already."""
        folder.mkdir(exist_ok=True)
        files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
        request, extensions = folder / "request", folder / "extensions"
        extensions.write_text(f"subjectAltName={names}\n")
        _openssl("req", *_KEY, "-subj", "/CN=test", "-keyout", files.key_file, "-out", request)
        ca = ("-CA", self.certificate, "-CAkey", self.key, "-set_serial", 7)
        _openssl("x509", "-req", "-in", request, *ca, "-days", days, "-extfile", extensions, "-out", files.cert_file)
        files.ca_file.write_bytes(self.certificate.read_bytes())
        return files
