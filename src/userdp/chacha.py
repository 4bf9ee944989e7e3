"""ChaCha20 as numpy's source of random bits: a cipher's keystream in place of Philox.

The cipher is that of `cryptography` (RFC 8439). numpy's `Generator` draws everything else from the
bits: coins, choices, normal numbers. numpy asks for bits through pointers to compiled functions;
they read the keystream from a buffer, which is filled again by the cipher when it is used up.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import threading
import weakref
from typing import Any

import numpy as np

from userdp.errors import InputError

# Words of keystream in the buffer; a count of those used up stands before them.
_WORDS = 4096
_ZEROS = bytes(8 * _WORDS)
# Every buffer's cipher, and the bytes that it fills, by the buffer's address.
_CIPHERS: dict[int, tuple[Any, Any]] = {}


class _Functions(ctypes.Structure):
    """numpy's `bitgen_t`: where a generator finds its state and its four functions."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("next_uint64", ctypes.c_void_p),
        ("next_uint32", ctypes.c_void_p),
        ("next_double", ctypes.c_void_p),
        ("next_raw", ctypes.c_void_p),
    )


class ChaCha20Bits:
    """The keystream of one key, from its beginning, with a nonce of zeros.

    A key is used for one stream only, so the nonce need not differ.
    """

    def __init__(self, key: bytes) -> None:
        cipher = _keystream(key)
        functions = _compiled()
        self.lock = threading.Lock()
        self._words = np.zeros(1 + _WORDS, dtype=np.uint64)
        self._words[0] = _WORDS
        address = self._words.ctypes.data
        _CIPHERS[address] = (cipher, self._words[1:].view(np.uint8))
        weakref.finalize(self, _CIPHERS.pop, address)
        addresses = (functions[name].address for name in ("bits", "half", "double", "bits"))
        self._functions = _Functions(address, *addresses)
        make: Any = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        # numpy copies the pointers and keeps this object, so what they point to stays.
        self.capsule = make(ctypes.addressof(self._functions), b"BitGenerator", None)


def chacha20_rng(key: bytes) -> np.random.Generator:
    """numpy's generator on the keystream of a key of 256 bits."""
    bits: Any = ChaCha20Bits(key)
    return np.random.Generator(bits)


def _keystream(key: bytes) -> Any:
    try:
        ciphers: Any = importlib.import_module("cryptography.hazmat.primitives.ciphers")
    except ModuleNotFoundError:
        raise InputError(
            'randomness = "chacha20" takes its cipher from the package cryptography, which is not '
            "installed: pip install 'userdp[crypto]', or leave randomness out."
        ) from None
    # Of the sixteen bytes, four count the blocks and twelve are the nonce.
    return ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _refill(address: int) -> None:
    """Fill the buffer with the keystream's next words, or end the process."""
    try:
        cipher, buffer = _CIPHERS[address]
        cipher.update_into(_ZEROS, buffer)
    except BaseException as error:
        # numpy cannot be told, and would go on with old bits as if they were new: with noise that
        # was used before, or with none. A process that is killed loses nothing of its record.
        os.write(2, f"userdp: no random bits from ChaCha20 ({error!r}): stopped.\n".encode())
        os._exit(1)


@functools.cache
def _compiled() -> dict[str, Any]:
    """The functions that numpy calls, compiled once in a process."""
    numba: Any = importlib.import_module("numba")
    types = numba.types
    refill = _refill
    count = _WORDS

    @numba.njit
    def following(state: Any) -> Any:
        words = numba.carray(state, (1 + count,), np.uint64)
        used = words[0]
        if used == count:
            refill(state)
            used = np.uint64(0)
        words[0] = used + np.uint64(1)
        return words[1 + used]

    @numba.cfunc(types.uint64(types.voidptr))
    def bits(state: Any) -> Any:
        return following(state)

    @numba.cfunc(types.uint32(types.voidptr))
    def half(state: Any) -> Any:
        return np.uint32(following(state) >> np.uint64(32))

    @numba.cfunc(types.float64(types.voidptr))
    def double(state: Any) -> Any:
        return (following(state) >> np.uint64(11)) * 2.0**-53

    return {"bits": bits, "half": half, "double": double}
