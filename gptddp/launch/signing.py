"""Values in the rendezvous' store, signed with the job's key: nobody can forge one without it.

A value is `<HMAC-SHA256 in hex> <text>`, or `unsigned <text>` in a job without a key. The HMAC is
over the rendezvous id, the name of the store's key, and the text: a value of another job, or of
another name, does not verify. Nothing from the store is ever unpickled.
"""

import hmac
import os
import time

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousError

UNSIGNED = "unsigned"
FORGED_S = 5.0  # that a reader waits for a value that verifies
_POLL_S = 0.1


class Signer:
    """Signs and checks the texts of one rendezvous. `key`: empty for a job that has none."""

    def __init__(self, key: str, rendezvous_id: str) -> None:
        self._key, self._id = os.fsencode(key), rendezvous_id

    @property
    def has_key(self) -> bool:
        return bool(self._key)

    def sign(self, name: str, text: str) -> str:
        """The value to write under this name."""
        return f"{self._mac(name, text)} {text}"

    def read(self, name: str, value: bytes) -> str | None:
        """The text of a value found under this name; None where it does not verify."""
        try:
            mac, _, text = value.decode("utf-8").partition(" ")
        except UnicodeDecodeError:
            return None
        verifies = hmac.compare_digest(mac.encode(), self._mac(name, text).encode())
        return text if verifies else None

    def _mac(self, name: str, text: str) -> str:
        if not self._key:
            return UNSIGNED
        # no part can hold the separator: \0 is in no id, no name and no JSON
        message = "\0".join((self._id, name, text)).encode()
        return hmac.digest(self._key, message, "sha256").hex()


class SignedStore(PrefixStore):
    """The store of one round, with signed values: it has the address of the world's rank 0."""

    def __init__(self, prefix: str, store: Store, signer: Signer) -> None:
        super().__init__(prefix, store)
        self._prefix, self._signer = prefix, signer

    def set(self, key: str, value: str | bytes) -> None:
        text = value.decode() if isinstance(value, bytes) else value
        super().set(key, self._signer.sign(f"{self._prefix}/{key}", text))

    def get(self, key: str) -> bytes:
        """The value, once there is one that verifies. Raises RendezvousError after FORGED_S."""
        end = time.monotonic() + FORGED_S
        while (text := self._signer.read(f"{self._prefix}/{key}", super().get(key))) is None:
            if time.monotonic() > end:
                raise RendezvousError(
                    f"{key} in the store does not verify: see docs/security.md of the sources"
                )
            time.sleep(_POLL_S)
        return text.encode()
